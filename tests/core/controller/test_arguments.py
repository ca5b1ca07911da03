"""Cells are read before they travel."""

from __future__ import annotations

import ast
import contextlib
import functools
import marshal
import types
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from IPython.core.compilerop import CachingCompiler
from IPython.core.inputtransformer2 import TransformerManager

from cellmesh.controller import arguments
from cellmesh.controller.arguments import (
    Cell,
    CellSyntaxError,
    check_expression,
    is_async,
    read_cell,
)
from cellmesh.errors import MeshUsageError

GOOD = [
    *("", "x = 1\nprint(x)", "async with x:\n    pass", "# nothing", "%timeit x", "files = !ls"),
    *("x = 1;", "x?", "%%bash\nthis is no ) python", "größe = 'ü'", "x.y", "x[0]", "1 + x"),
    *("pwd\nls", "await x", "x: int", "from __future__ import annotations"),
]


@pytest.mark.parametrize("source", GOOD)
def test_cells_that_a_notebook_accepts_are_accepted(source: str) -> None:
    cell = read_cell(source)
    assert cell.source == source
    assert cell.transformed
    assert compile(cell.transformed, "cell", "exec", 0x2000)  # top-level await allowed


@pytest.mark.parametrize(
    ("source", "transformed"),
    [
        ("%pwd", "get_ipython().run_line_magic('pwd', '')\n"),
        ("    x = 1\n    y = 2", "x = 1\ny = 2\n"),
        ("%%bash\nls", "get_ipython().run_cell_magic('bash', '', 'ls\\n')\n"),
    ],
)
def test_magics_become_calls(source: str, transformed: str) -> None:
    assert read_cell(source).transformed == transformed


PIECES = st.sampled_from([
    *("x", " ", "    ", "\n", "\n", "\n    ", "\r\n", "\t", "\f", "\u2028", "\\\n", "# "),
    *("%", "%%", "!", "!!", "?", "??", "/", ",", ";", "=", "==", "!=", "%time ", "ls", "a = "),
    *(">>> ", "... ", "...", "...: ", "In [1]: ", "[nav] In [2]: ", "(", ")"),
    *("'''", '"""', "'", "if x:", "def f():", "return 1"),
])  # fmt: skip


@pytest.mark.filterwarnings("ignore:`make_tokens_by_line`")
@given(st.lists(PIECES, max_size=8).map("".join))
@example("x\n\xa0>>> y")
def test_a_cell_is_transformed_as_by_ipython(source: str) -> None:
    expected = None
    with contextlib.suppress(SyntaxError, IndexError):  # IPython's own, at "a = %"
        expected = TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call]
    if expected is not None:
        assert arguments._transform(source) == expected


def test_most_cells_skip_ipythons_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(arguments, "_transformer")
    read_cell("for x in range(3):\n    y = x % 2 != 1\n\nprint(f'{y:.3f}', 5 / y)")


COMPILED = [
    *("async def f(): await x", "x = 1", "'doc'\nx = 1", "x = f(\n1)\nfor y in x:\n    y", ""),
    *("# nothing", "# %%dist\nf(x)  # it\n\n# end", "'doc'", "x = 1\nx", "x\n\\\n# end", "x; y"),
]


@pytest.mark.parametrize("source", COMPILED)
def test_a_cell_is_compiled_as_by_ipython(source: str) -> None:
    compiler, cell = CachingCompiler(), read_cell(source, 7)  # type: ignore[no-untyped-call]
    name = compiler.cache(cell.transformed, 7)
    body = ast.parse(cell.transformed).body
    shown = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
    parts = [compiler(ast.Module(body, []), name, "exec")] * bool(body or not shown)
    parts += [compiler(ast.Interactive([each]), name, "single") for each in shown]
    assert [*map(facts, marshal.loads(cell.code))] == [*map(facts, parts)]


def facts(code: Any) -> Any:
    """All of a code object that equality may leave out."""
    inner = [facts(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return code, code.co_filename, code.co_flags, [*code.co_positions()], inner


OF_RANKS = ["await x", "x\nawait x", "async for x in y: pass", "from __future__ import annotations"]


@pytest.mark.parametrize("source", OF_RANKS)
def test_ranks_compile_what_awaits_or_changes_their_compiler(source: str) -> None:
    assert read_cell(source) == Cell(source, f"{source}\n", b"", awaits="future" not in source)


def test_functions_whose_calls_return_coroutines_are_known() -> None:
    class Serving:
        async def __call__(self) -> None: ...

        async def serve(self) -> None: ...

    async def serve() -> None: ...

    partial = functools.partial(serve)
    assert all(map(is_async, (serve, Serving().serve, Serving.serve, Serving(), partial)))
    assert not any(map(is_async, (len, Serving, lambda: serve(), functools.partial(print))))


@pytest.mark.parametrize("error", [SystemError, RecursionError])
def test_a_cell_without_a_syntax_tree_is_left_to_the_ranks(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(source: Any, name: str, mode: str, flags: int, **options: Any) -> Any:
        if flags & ast.PyCF_ONLY_AST:
            raise error
        return compile(source, name, mode, flags, **options)

    monkeypatch.setattr(arguments, "compile", disturbed, raising=False)
    assert read_cell("x = 1") == Cell("x = 1", "x = 1\n", b"")
    with pytest.raises(CellSyntaxError):
        read_cell("return")


@pytest.mark.parametrize("source", ["pwd", "ls -l", "# where?\npwd", "hello world", "x", "x + 1"])
def test_possible_automagics_are_left_to_the_ranks(source: str) -> None:
    assert read_cell(source) == Cell(source, "", b"")


BAD = {
    "open bracket": "f(",
    "bad indent": "x = 1\n  y = 2",
    "a NUL": "x = '\0'",
    "nested too deeply": "(" * 500 + ")" * 500,
    "a lone surrogate": "x = '\ud800'",
    "a number of many digits": "x = " + "9" * 10_000,
    # The parser takes these, the compiler does not.
    "return": "return 1",
    "global after use": "x = 1\ndef f():\n    x = 2\n    global x",
    "await outside async": "def f():\n    await x",
    "unknown future": "from __future__ import flying_cars",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD)
def test_a_syntax_error_is_found_before_anything_runs(source: str) -> None:
    with pytest.raises(CellSyntaxError):
        read_cell(source)


@pytest.mark.parametrize(("line", "text"), [("y = = 2", "y = = 2\n"), ("return 1", "return 1")])
def test_the_error_names_cell_line_and_text(line: str, text: str | None) -> None:
    with pytest.raises(CellSyntaxError) as caught:
        read_cell(f"x = 1\n{line}\n", execution_count=7)
    error = caught.value
    assert (error.filename, error.lineno, error.text) == ("In[7]", 2, text)


def test_this_packages_future_imports_do_not_apply_to_cells() -> None:
    namespace: dict[str, Any] = {}
    transformed = read_cell("def f(x: int): pass").transformed
    exec(compile(transformed, "cell", "exec", dont_inherit=True), namespace)
    assert namespace["f"].__annotations__ == {"x": int}


@pytest.mark.parametrize("text", ["model", " model, opt ", "(x := 3)", "f(a)[0].b"])
def test_expressions_that_ranks_can_evaluate_are_accepted(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model opt", "'model opt' is no expression: .*; several values are `model, opt`"),
        ("", "'' is no expression: invalid syntax"),
        ("f(", r"'f\(' is no expression: '\(' was never closed"),
        ("await f()", "'await' outside function"),
        ("x\0", "null bytes"),
    ],
)
def test_other_texts_are_the_users_error(text: str, why: str) -> None:
    with pytest.raises(MeshUsageError, match=why):
        check_expression(text)
