"""Cells are checked before they travel."""

from __future__ import annotations

import pytest

from cellmesh.controller.source import CellSyntaxError, check_source

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
    "unknown escape": r"'\d'",
    "literal is": "x is 1",
}


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.is. with :SyntaxWarning")
@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
def test_what_a_notebook_takes_is_taken(source: str) -> None:
    assert check_source(source) is None


DOES_NOT_PARSE = {
    "open bracket": "f(",
    "no block": "if x:",
    "bad indent": "x = 1\n  y = 2",
    "two words": "hello world",
    "open text": "'abc",
    "keyword": "class = 3",
    "a NUL": "x\0y",
    "nested too deeply": "(" * 500 + ")" * 500,
    "a lone surrogate": "'\ud800'",
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
        check_source(source)
    assert type(caught.value) is CellSyntaxError


def test_the_error_names_cell_line_and_text() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_source("x = 1\ny = = 2\n", execution_count=7)
    assert caught.value.filename == "In[7]"
    assert caught.value.lineno == 2
    assert caught.value.text == "y = = 2\n"


def test_a_cell_without_a_number_is_just_a_cell() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_source("f(")
    assert caught.value.filename == "cell"
