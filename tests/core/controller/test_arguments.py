"""Cells are read before they travel."""

from __future__ import annotations

import pytest

from cellmesh.controller.arguments import Cell, CellSyntaxError, read_cell

GOOD = {
    "empty": "",
    "plain": "x = 1\nprint(x)",
    "await": "await something()",
    "async for": "async for x in y:\n    pass",
    "async with": "async with x:\n    pass",
    "line magic": "%timeit x",
    "shell": "!ls -l",
    "assigned shell": "files = !ls",
    "cell magic": "%%bash\nthis is no ) python",
    "indented": "    x = 1\n    y = 2",
    "quiet": "x = 1;",
    "help": "x?",
    "future": "from __future__ import annotations",
    "unicode": "größe = 'ü'",
    "comment": "# nothing",
}


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
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


@pytest.mark.parametrize(
    ("source", "is_async"),
    [
        ("await x", True),
        ("async for x in y: pass", True),
        ("async def f(): await x", False),
        ("x = 1", False),
    ],
)
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
        "x = 1",
        "x.y",
        "x()",
        "x[0]",
        "pass",
        "del x",
        "import os",
        "1 + x",
        "pwd\nls",
        "await x",
        "x: int",
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
    assert caught.value.filename == "In[7]"
    assert caught.value.lineno == 2
    assert caught.value.text == "y = = 2\n"


def test_a_cell_without_a_number_is_just_a_cell() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        read_cell("f(")
    assert caught.value.filename == "cell"


def test_this_packages_future_imports_do_not_apply_to_cells() -> None:
    namespace: dict[str, object] = {}
    exec(
        compile(read_cell("def f(x: int): pass").transformed, "cell", "exec", dont_inherit=True),
        namespace,
    )
    assert namespace["f"].__annotations__ == {"x": int}  # type: ignore[attr-defined]
