"""Classes of the notebook on ranks, and of ranks' cells in the notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import cellmesh as cm

IMPORTS = "import dataclasses, enum, typing\n"
KINDS = {
    "dataclass": ("@dataclasses.dataclass\nclass Kind:\n    x: int = 1", "Kind(2)"),
    "enum": ("class Kind(enum.Enum):\n    A = 1\n    B = 2", "Kind.B"),
    "plain": (
        "LIMIT = 3\nclass Kind:\n    def __eq__(self, other): return type(other) is Kind\n"
        "    def limit(self): return LIMIT\n    __hash__ = None",
        "Kind()",
    ),
    "nested": (
        "class Kind:\n    @dataclasses.dataclass\n    class Inner:\n        x: int = 1",
        "Kind.Inner(3)",
    ),
    "exception": (
        "class Kind(ValueError):\n    def __eq__(self, other):\n"
        "        return type(other) is type(self) and self.args == other.args\n"
        "    __hash__ = None",
        "Kind('no')",
    ),
}


@pytest.fixture(autouse=True)
def notebook(monkeypatch: pytest.MonkeyPatch, quick: cm.Mesh) -> Iterator[dict[str, Any]]:
    """The namespace of a notebook, as its ``__main__``."""
    module = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield vars(module)
    quick.cell("for name in {'Kind', 'LIMIT', 'value'} & set(globals()): del globals()[name]")


SAVES = """
import io, pickle
assert pickle.loads(pickle.dumps(value)) == value
file = io.BytesIO()
torch.save(value, file)
file.seek(0)
assert torch.load(file, weights_only=False) == value
everyones = [None, None]
dist.all_gather_object(everyones, value)
assert everyones == [value, value], everyones
"""


@pytest.mark.parametrize("name", KINDS)
def test_a_pushed_instance_is_saved_and_sent_among_ranks(
    quick: cm.Mesh, notebook: dict[str, Any], name: str
) -> None:
    source, value = KINDS[name]
    exec(IMPORTS + source, notebook)
    quick.push(value=eval(value, notebook))
    quick.cell(SAVES)


def test_what_comes_back_is_of_the_notebooks_class(
    quick: cm.Mesh, notebook: dict[str, Any]
) -> None:
    source, value = KINDS["plain"]
    exec(source, notebook)
    method = notebook["Kind"].limit
    quick.push(value=eval(value, notebook))
    back = quick.pull("value")
    assert {type(each) for each in back.values()} == {notebook["Kind"]}
    assert notebook["Kind"].limit is method
    notebook["LIMIT"] = 4
    assert back[0].limit() == 4


def test_a_name_that_is_taken_stays_and_the_error_says_what_to_push(
    quick: cm.Mesh, notebook: dict[str, Any]
) -> None:
    source, value = KINDS["dataclass"]
    exec(IMPORTS + source, notebook)
    quick.cell("Kind = 'mine'")
    quick.push(value=eval(value, notebook))
    assert quick.pull("Kind")[0] == "mine"
    with pytest.raises(cm.RankFailure) as failure:
        quick.cell("import pickle; pickle.dumps(value)")
    assert "`%dist_push` it by its name" in "".join(
        note for error in failure.value.exceptions for note in error.__notes__
    )
    quick.push(Kind=notebook["Kind"])
    quick.cell(SAVES)
