"""What a rank offers at a cursor, from its namespace and the cell, without running the user's
code.
"""

from __future__ import annotations

import collections
import functools
import types
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from cellmesh.wire.completion import Complete, Completions
from cellmesh.workers.completion.complete import complete


def never(*args: object) -> NoReturn:
    raise AssertionError("the user's code ran")


class Trapped:
    """Whatever looks at it runs into a trap."""

    __class__ = property(never)  # type: ignore[assignment]
    __getattr__ = __dir__ = __getitem__ = __iter__ = __len__ = __eq__ = __repr__ = never  # type: ignore[assignment]
    __hash__ = never  # type: ignore[assignment]

    def __init__(self) -> None:
        vars(self)["held"] = [1]

    @property
    def made(self) -> dict[str, int]:
        return never()

    @functools.cached_property
    def kept(self) -> str:
        return never()

    def method(self, alpha: int, *, beta: int = 2) -> torch.Tensor:
        return never()


class AttrDict(dict[str, Any]):
    __getattr__ = never  # type: ignore[assignment]


class Slotted:
    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = [1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
        self.parts = nn.ModuleDict({"head": nn.Linear(2, 2)})
        self.register_buffer("mask", torch.ones(2))
        self.factor = 3

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return never()


def step(batch: object, lr: float = 0.1) -> Net:
    return never()


@functools.wraps(step)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    never()


Point = collections.namedtuple("Point", "east north")


@pytest.fixture(scope="module")
def shell() -> Any:
    model = Net()
    namespace = {
        "torch": torch, "nn": nn, "trapped": Trapped(), "model": model, "state": model.state_dict(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "step": step, "wrapped": wrapped,
        "compiled": _like_compiled(model), "config": AttrDict(depth=AttrDict(width=3)),
        "slotted": Slotted(),
        "nested": {"a b": {"inner": 1}, "it's": [1], 5: 6, ("x", 1): 2},
        "point": Point("e", {"n": 1}),
        "number": 0, "_hidden": 1,
    }  # fmt: skip
    return types.SimpleNamespace(user_ns=namespace, user_ns_hidden={})


def _like_compiled(model: nn.Module) -> nn.Module:
    """What torch.compile gives, which lends the model's attributes by a `__getattr__`."""

    class OptimizedModule(nn.Module):
        __getattr__ = never  # type: ignore[assignment]

    optimized = OptimizedModule()
    vars(optimized)["_modules"]["_orig_mod"] = model
    return optimized


def ask(shell: Any, code: str) -> Completions:
    """What could stand at the bar in the code, or at its end."""
    cursor = code.find("|") if "|" in code else len(code)
    return complete(shell, Complete(code.replace("|", "", 1), cursor))


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("mod", "model", "instance"),
        ("ste", "step", "function"),
        ("pri", "print", "function"),
        ("whi", "while", "keyword"),
        ("model.la", "layers", "instance"),
        ("model.ma", "mask", "instance"),
        ("model.fac", "factor", "instance"),
        ("model.layers[-1].we", "weight", "instance"),
        ("model.parts['head'].bi", "bias", "instance"),
        ("model.layers[number].we", "weight", "instance"),
        ("model.layers[0].weight.sha", "shape", "instance"),
        ("model.mask.grad.dt", "dtype", "instance"),
        ("model.mask[0].dt", "dtype", "instance"),
        ("model(3).dt", "dtype", "instance"),
        ("compiled.la", "layers", "instance"),
        ("compiled.layers[0].we", "weight", "instance"),
        ("trapped.he", "held", "instance"),
        ("trapped.held.app", "append", "function"),
        ("trapped.ma", "made", "property"),
        ("trapped.made.ke", "keys", "function"),
        ("trapped.kept.upp", "upper", "function"),
        ("trapped.method(1).sha", "shape", "instance"),
        ("config.de", "depth", "instance"),
        ("config.depth.wi", "width", "instance"),
        ("slotted.full.app", "append", "function"),
        ("point.no", "north", "instance"),
        ("point.north['", "n", "dict key"),
        ("step(1).load_s", "load_state_dict", "function"),
        ("torch.ones(3).sha", "shape", "instance"),
        ("torch.one", "ones", "function"),
        ("nn.Linear(1, 2).in_f", "in_features", "instance"),
        ("state['lay", "layers.0.weight", "dict key"),
        ("nested['a b']['", "inner", "dict key"),
        ('nested["it', "it's", "dict key"),
        ("nested['it", "it\\'s", "dict key"),
        ("nested[", "'a b'", "dict key"),
        ("nested[", "5", "dict key"),
        ("nested[", "number", "instance"),
        ("optimizer.param_groups[0]['mom", "momentum", "dict key"),
        ("step(", "batch=", "param"),
        ("step(1, l", "lr=", "param"),
        ("wrapped(l", "lr=", "param"),
        ("trapped.method(be", "beta=", "param"),
        ("model(1, sc", "scale=", "param"),
        ("nn.Linear(in_", "in_features=", "param"),
        ("import torch.nn.func", "functional", "module"),
        ("from torch.nn import Lin", "Linear", "class"),
        ("_hid", "_hidden", "instance"),
        ("f'{model.la", "layers", "instance"),
        ("%timeit model.la", "layers", "instance"),
    ],
)
def test_existing_names_are_offered(shell: Any, code: str, text: str, kind: str) -> None:
    found = ask(shell, code)
    assert (text, kind) in zip(found.texts, found.kinds, strict=True)
    assert found.end == len(code)


@pytest.mark.parametrize(
    "code",
    ["nothing.", "trapped.gone.", "trapped[0].", "nested['no'].", "'text", "# model.", "3.",
     "never_bound.x.",
     "model.state_dict().", "import nothing.here.", "slotted.empty."],
)  # fmt: skip
def test_unknown_completions_are_left_to_the_notebook(shell: Any, code: str) -> None:
    found = ask(shell, code)
    assert (found.texts, found.is_whole) == ((), False)


def test_only_attributes_follow_a_dot_and_only_keys_fill_a_subscript(shell: Any) -> None:
    assert ask(shell, "model.la").is_whole
    assert ask(shell, "state['").is_whole
    assert not ask(shell, "mod").is_whole
    assert not ask(shell, "nested[").is_whole


def test_private_names_are_offered_after_an_underscore(shell: Any) -> None:
    assert not [text for text in ask(shell, "model.").texts if text.startswith("_")]
    assert "_modules" in ask(shell, "model._m").texts
    assert "_hidden" not in ask(shell, "").texts


def test_arguments_precede_names_of_the_user(shell: Any) -> None:
    texts = ask(shell, "step(").texts
    assert texts[:2] == ("batch=", "lr=")
    assert texts.index("model") < texts.index("ArithmeticError")


def test_keys_keep_their_order(shell: Any) -> None:
    assert ask(shell, "state['").texts == tuple(shell.user_ns["state"])


# ---- what the cell binds before it has run


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("alpha_one = 1\nalp|", "alpha_one"),
        ("for alpha in x:\n    alp|", "alpha"),
        ("with open(f) as alpha:\n    alp|", "alpha"),
        ("import numpy as alpha\nalp|", "alpha"),
        ("from x import y as alpha\nalp|", "alpha"),
        ("def f(alpha):\n    return alp|", "alpha"),
        ("class Alpha: pass\nAlp|", "Alpha"),
        ("%time\n!ls it's\nalpha = 1\nalp|", "alpha"),
        ("alpha = 1\nbroken = (\nalp|", "alpha"),
        ("x = torch.ones(3)\nx.sha|", "shape"),
        ("x = model.layers\nx[0].we|\ny = 2", "weight"),
        ("import torch.nn.functional as F\nF.rel|", "relu"),
        ("from torch import nn as parts\nparts.Lin|", "Linear"),
        ("def f(m: nn.Linear):\n    m.wei|", "weight"),
        ("x: list[int] = [1]\nx.app|", "append"),
    ],
)
def test_names_bound_by_the_cell_are_offered(shell: Any, code: str, text: str) -> None:
    assert text in ask(shell, code).texts


def test_a_cells_own_class_hides_the_ranks(shell: Any) -> None:
    assert ask(shell, "class model:\n    pass\nmodel.la|").texts == ()


def test_a_name_bound_by_itself_is_the_ranks(shell: Any) -> None:
    assert "layers" in ask(shell, "model = model\nmodel.la|").texts


def test_names_bound_below_the_cursor_have_no_values(shell: Any) -> None:
    assert "layers" in ask(shell, "model.la|\nmodel = [1]").texts


def test_only_the_users_names_where_so_asked(shell: Any) -> None:
    found = complete(shell, Complete("", 0, users_only=True))
    assert set(found.texts) == set(shell.user_ns) - {"torch", "_hidden"}
    assert complete(shell, Complete("model.la", 8, users_only=True)).texts == ("layers",)
