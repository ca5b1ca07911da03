"""Cells are read before they travel."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.arguments import Cell, CellSyntaxError, read_cell

GOOD = [
    *("", "x = 1\nprint(x)", "await something()", "async for x in y:\n    pass", "# nothing"),
    *("async with x:\n    pass", "%timeit x", "!ls -l", "files = !ls", "x = 1;", "x?"),
    *("%%bash\nthis is no ) python", "    x = 1\n    y = 2", "größe = 'ü'"),
    "from __future__ import annotations",
]


@pytest.mark.parametrize("source", GOOD)
def test_cells_that_a_notebook_accepts_are_accepted(source: str) -> None:
    cell = read_cell(source)
    assert cell.source == source
    assert compile(cell.transformed, "cell", "exec", 0x2000)  # top-level await allowed


@pytest.mark.parametrize("source", [r"'\d'", "y = x is 1", "assert (1, 'x')"])
def test_doubtful_cells_are_accepted(source: str) -> None:
    with pytest.warns((DeprecationWarning, SyntaxWarning)):
        assert read_cell(source).transformed


@pytest.mark.parametrize(
    ("source", "transformed"),
    [
        ("%pwd", "get_ipython().run_line_magic('pwd', '')\n"),
        ("!ls", "get_ipython().system('ls')\n"),
        ("    x = 1\n    y = 2", "x = 1\ny = 2\n"),
        ("%%bash\nls", "get_ipython().run_cell_magic('bash', '', 'ls\\n')\n"),
    ],
)
def test_magics_become_calls(source: str, transformed: str) -> None:
    assert read_cell(source).transformed == transformed


AWAITS = {"await x": True, "async for x in y: pass": True, "async def f(): await x": False}


@pytest.mark.parametrize(("source", "is_async"), [*AWAITS.items(), ("x = 1", False)])
def test_awaiting_at_top_level_is_noticed(source: str, is_async: bool) -> None:
    assert read_cell(source).is_async is is_async


@pytest.mark.parametrize(
    "source", ["pwd", "cd /tmp", "ls -l", "# where?\npwd", "hello world", "x", "x + 1"]
)
def test_possible_automagics_are_left_to_the_ranks(source: str) -> None:
    assert read_cell(source) == Cell(source, "", False)


@pytest.mark.parametrize(
    "source",
    [
        *("x = 1", "x.y", "x()", "x[0]", "pass", "del x", "import os", "1 + x", "pwd\nls"),
        *("await x", "x: int"),
    ],
)
def test_cells_that_are_no_magic_are_parsed_in_the_notebook(source: str) -> None:
    assert read_cell(source).transformed


DOES_NOT_PARSE = {
    "open bracket": "f(",
    "no block": "if x:",
    "bad indent": "x = 1\n  y = 2",
    "open text": "'abc",
    "keyword": "class = 3",
    "a NUL": "x = '\0'",
    "nested too deeply": "(" * 500 + ")" * 500,
    "a lone surrogate": "x = '\ud800'",
    "a number of many digits": "x = " + "9" * 10_000,
}
# The parser takes these, the compiler does not.
DOES_NOT_COMPILE = {
    "return": "return 1",
    "yield": "yield 1",
    "break": "break",
    "continue": "continue",
    "nonlocal": "nonlocal x",
    "argument twice": "def f(x, x): pass",
    "global after use": "x = 1\ndef f():\n    x = 2\n    global x",
    "await outside async": "def f():\n    await x",
    "unknown future": "from __future__ import flying_cars",
    "star": "*x",
}
BAD = {**DOES_NOT_PARSE, **DOES_NOT_COMPILE}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD)
def test_a_syntax_error_is_found_before_anything_runs(source: str) -> None:
    with pytest.raises(SyntaxError) as caught:
        read_cell(source)
    assert type(caught.value) is CellSyntaxError


def test_the_error_names_cell_line_and_text() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        read_cell("x = 1\ny = = 2\n", execution_count=7)
    error = caught.value
    assert (error.filename, error.lineno, error.text) == ("In[7]", 2, "y = = 2\n")
    with pytest.raises(CellSyntaxError) as caught:
        read_cell("f(")
    assert caught.value.filename == "cell"


def test_this_packages_future_imports_do_not_apply_to_cells() -> None:
    namespace: dict[str, Any] = {}
    transformed = read_cell("def f(x: int): pass").transformed
    exec(compile(transformed, "cell", "exec", dont_inherit=True), namespace)
    assert namespace["f"].__annotations__ == {"x": int}
