"""The help for what a rank has, asked for while its main thread runs."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from IPython.core.oinspect import Inspector
from torch import nn

from cellmesh.wire.completion import Explain
from cellmesh.workers.completion.help import explain


class Own:
    """What somebody wrote."""

    num_texts = 0

    def __repr__(self) -> str:
        Own.num_texts += 1
        return "own"


class OwnModule(nn.Module):
    """A module with a text of its own."""

    __repr__ = Own.__repr__  # type: ignore[assignment]


class Asking:
    """What answers by code."""

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise AttributeError(name)

    def __len__(self) -> int:
        RAN.append("len")
        return 3

    def getdoc(self) -> str:
        RAN.append("getdoc")
        return "doc"

    @property
    def __signature__(self) -> Any:
        RAN.append("signature")
        raise AttributeError

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        RAN.append("class")
        return Asking

    def __repr__(self) -> str:
        RAN.append("repr")
        return "asking"

    def __call__(self, step: int, *more: int, scale: object = 2.0, **others: int) -> None:
        RAN.append("call")


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        RAN.append(f"meta {name}")
        raise AttributeError(name)


class OfMeta(metaclass=Meta):
    """Of a metaclass."""

    def __init__(self, size: int) -> None:
        """Make one."""


class Lazy(types.ModuleType):
    """A module that answers by code."""

    def __getattr__(self, name: str) -> Any:
        RAN.append(f"lazy {name}")
        raise AttributeError(name)


RAN: list[str] = []


def defaulted(step: int, value: object = Asking()) -> None:
    """Has a default."""


def wrapped(rows: list[int], last: int | None = None) -> None:
    """A wrapped one."""


@functools.wraps(wrapped)
def wrapping(*args: Any) -> None:
    pass


@pytest.mark.parametrize("detail", [0, 1])
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (Asking(), ["What answers by code.", "scale: 'object' = 2.0", "Asking"]),
        (OfMeta, ["Of a metaclass.", "(size: 'int')"]),
        (OfMeta(3), ["Of a metaclass.", "Make one."]),
        (Lazy("lazy", "Its text."), ["Its text.", "Lazy"]),
        (defaulted, ["Has a default.", "value: 'object' = <Asking>"]),
        (wrapping, ["A wrapped one.", "(rows: 'list[int]', last: 'int | None' = None)"]),
        (nn.Linear, ["in_features", "Applies an affine"]),
        (nn.Linear(2, 3), ["Linear(in_features=2", "Applies an affine"]),
        ([1, 2], ["[1, 2]", "Length"]),
    ],
    ids=["object", "class", "instance", "module", "default", "wrapper", "torch", "layer", "list"],
)
def test_help_asks_no_code_of_the_users(value: Any, wanted: list[str], detail: int) -> None:
    shell: Any = SimpleNamespace(
        user_ns={"x": value}, inspector=Inspector(theme_name="nocolor"), cell_of=lambda file: None
    )
    RAN.clear()
    told = explain(shell, Explain("x", detail))
    assert RAN == []
    if not detail:
        assert [part for part in wanted if part not in told] == [], told
    elif type(value) is nn.Linear:
        assert "class Linear(Module)" in told
    elif value is defaulted or value is wrapping:
        assert f"def {'defaulted' if value is defaulted else 'wrapped'}(" in told


@dataclasses.dataclass
class Point:
    """Where something is."""

    east: int


class Sized(nn.Module):
    """A module of the user's."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Go forward."""
        return x

    @property
    def size(self) -> int:
        """How large."""
        RAN.append("size")
        return 3


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "x",
            ["x(x: 'torch.Tensor', scale: 'float' = 1.0)", "A module of the user's"],
        ),
        ("x.forward", ["Signature: x.forward(x: 'torch.Tensor'", "Go forward.", "test_help.py"]),
        ("x.size", ["How large.", "test_help.py"]),
        ("tensor", ["String form: Tensor[3, 4]"]),
        ("tensor.shape", ["Returns the size of"]),
        ("Point", ["Init signature: Point(east: 'int')", "Where something is.", "test_help.py"]),
        ("Point?", ["class Point:", "east: int"]),
        ("x?", ["class Sized(nn.Module):"]),
        ("x.size?", ["def size(self)"]),
        ("asking?", ["class Asking:", "def getdoc"]),
        ("len", ["Signature: len(obj, /)"]),
        ("nn", ["File:", "__init__.py"]),
        ("nn.Module?", ["class Module:"]),
    ],
)
def test_help_says_how_something_is_called_and_where_it_stands(
    name: str, wanted: list[str]
) -> None:
    names = {"x": Sized(), "tensor": torch.ones(3, 4), "Point": Point, "nn": nn, "asking": Asking()}
    shell: Any = SimpleNamespace(
        user_ns=names, inspector=Inspector(theme_name="nocolor"), cell_of=lambda file: None
    )
    RAN.clear()
    told = explain(shell, Explain(name.rstrip("?"), name.count("?")))
    assert RAN == []
    assert [part for part in wanted if part not in told] == [], told


def annotated(first, second, third, *, fourth) -> None:  # type: ignore[no-untyped-def]
    """Has annotations that are no texts."""


annotated.__annotations__ = {
    "first": Annotated[int, Asking()],
    "second": list[OfMeta],
    "third": tuple[torch.Tensor, ...] | None,
    "fourth": Callable[[int], list[str]],
}


def test_help_writes_annotations_without_code_of_theirs() -> None:
    shell: Any = SimpleNamespace(
        user_ns={"x": annotated},
        inspector=Inspector(theme_name="nocolor"),
        cell_of=lambda file: None,
    )
    RAN.clear()
    told = explain(shell, Explain("x"))
    assert RAN == []
    assert "first: <_AnnotatedAlias>" in told
    assert "second: <GenericAlias>" in told
    assert "third: tuple[torch.Tensor, ...] | None" in told
    assert re.search(r"fourth: [\w.]*Callable\[\[int\], list\[str\]\]", told)


def freed() -> torch.Tensor:
    value = torch.ones(1 << 20)
    value.untyped_storage().resize_(0)
    return value


@pytest.mark.parametrize("detail", [0, 1])
def test_help_runs_no_repr_and_reads_no_elements(detail: int) -> None:
    names = {
        "own": Own(),
        "freed": freed(),
        "many": [1, Own(), freed()],
        "two": 2,
        "function": freed,
    }
    names |= {"layers": nn.Sequential(nn.Linear(2, 3)), "mixed": nn.Sequential(OwnModule())}
    inspector = Inspector(theme_name="nocolor")
    shell: Any = SimpleNamespace(user_ns=names, inspector=inspector, cell_of=lambda file: None)
    told = {name: explain(shell, Explain(name, detail)) for name in names}
    assert "String form: 2" in told["two"]
    assert "Tensor[1048576]" in told["freed"]
    assert "Tensor[1048576]" in told["many"]
    assert "What somebody wrote." in told["own"] or detail
    assert "function" in told["function"]
    assert "(0): Linear(in_features=2" in told["layers"]
    assert "<Sequential>" in told["mixed"]
    assert Own.num_texts == 0
    assert "info" not in vars(inspector)
