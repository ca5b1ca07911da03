"""Which cells go to the ranks, by their magic or in auto mode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.magics.auto import (
    AUTO_MAGIC,
    CellForRanks,
    magics_inside,
    make_transformer,
    read_cell,
    read_help,
    stays_here,
)


def lines_of(source: str) -> list[str]:
    return source.splitlines(keepends=True)


GOES = {
    "code": "x = 1\nprint(x)\n",
    "a magic of the ranks": "%timeit x\n",
    "a cell magic of the ranks": "%%time\nx = 1\n",
    "nothing below a cell magic": "%%time\n",
    "shell": "!nvidia-smi\n",
    "a comment that asks": "# does this work?\nx = 1\n",
    "a name like ours": "%distance\n",
    "code before one of our magics": "x = 1\n%dist_push x\n",
    "more help": "x.y[0].z??\n",
    "help after a comment": "# what is it?\nx?\n",
}
STAYS = {
    "nothing": "",
    "ours": "%dist_status\n",
    "ours, indented": "  %dist_stop\n",
    "to the ranks by hand": "%%dist --ranks 0\nx = 1\n",
    "here by hand": "%%local\nx = 1\n",
    "to the ranks by hand, captured": "%%capture out\n%%dist --ranks 0\nx = 1\n",
    "here by hand, timed": "%%time\n\n%%timeit -n1\n%%local\nx = 1\n",
    "sent already": f"%%{AUTO_MAGIC}\nx = 1\n",
    "extensions": "%load_ext cellmesh\n",
    "a search": "x*?\n",
    "help for a magic": "%timeit?\n",
}


@pytest.mark.parametrize("source", GOES.values(), ids=GOES)
def test_goes_to_the_ranks(source: str) -> None:
    is_on = True
    transform = make_transformer(lambda: is_on)
    assert transform(lines_of(source)) == [f"%%{AUTO_MAGIC}\n", *lines_of(source)]
    is_on = False
    assert transform(lines_of(source)) == lines_of(source)


@pytest.mark.parametrize("source", STAYS.values(), ids=STAYS)
def test_stays_in_the_notebook(source: str) -> None:
    transform = make_transformer(lambda: True)
    assert transform(lines_of(source)) == lines_of(source)


@given(st.text(max_size=40))
def test_sending_twice_is_sending_once(source: str) -> None:
    transform = make_transformer(lambda: True)
    once = transform(lines_of(source))
    assert transform(once) == once
    assert stays_here(once)


def test_our_magics_among_code_are_found() -> None:
    source = "x = 1\n%dist_push x\n  %dist_status now\n# %dist_stop\ny = '%dist_heal'\n%time y\n"
    assert magics_inside(source) == ["%dist_push", "%dist_status"]
    assert magics_inside("") == []


# ---- cells as the ranks get them


@pytest.mark.parametrize(
    ("code", "cell"),
    [
        ("%%dist\nx = 1", CellForRanks("x = 1", 7, "dist", "")),
        ("%%dist --ranks 0 \nx\ny", CellForRanks("x\ny", 18, "dist", "--ranks 0")),
        ("\n\n%%dist_profile\nx", CellForRanks("x", 17, "dist_profile", "")),
        ("%%time\n%%dist --ranks 0\nx", CellForRanks("x", 24, "dist", "--ranks 0")),
        ("%%capture out\n\n%%timeit -n1 -r1\n%%dist\nx", CellForRanks("x", 39, "dist", "")),
    ],
)
@pytest.mark.parametrize("is_auto", [True, False])
def test_a_cells_source_and_where_it_begins(code: str, cell: CellForRanks, is_auto: bool) -> None:
    assert read_cell(code, is_auto) == cell
    assert code[cell.begin :] == cell.source


@pytest.mark.parametrize("code", ["%%dist", "%%local\nx", "x = '%%dist'\ny", "%dist_status\n", ""])
@pytest.mark.parametrize("is_auto", [True, False])
def test_cells_of_the_notebooks_own(code: str, is_auto: bool) -> None:
    assert read_cell(code, is_auto and not code.startswith("x")) is None


def test_in_auto_mode_a_plain_cell_is_the_ranks() -> None:
    assert read_cell("x = 1", is_auto=True) == CellForRanks("x = 1")
    assert read_cell("%%distance\nx", is_auto=False) is None


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("x?", ("x", 0)),
        (" ?? x ", ("x", 1)),
        ("model.layers[0].forward?\n", ("model.layers[0].forward", 0)),
        ("d['a'].b?", ("d['a'].b", 0)),
        ("x", None),
        ("?", None),
        ("x = 1\nx?", None),
        ("f(x)?", None),
    ],
)
def test_help_that_is_asked_for(source: str, asked: tuple[str, int] | None) -> None:
    assert read_help(source) == asked
