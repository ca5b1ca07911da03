"""Parses and checks cells, expressions and arguments for the ranks before they are sent."""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import hashlib
import inspect
import keyword
import marshal
import re
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import MeshUsageError

if TYPE_CHECKING:
    from IPython.core.inputtransformer2 import TransformerManager


def read_argv(argv: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Parse a cell's arguments for ``sys.argv``: a text, split as by a shell, or a list.

    Raises:
        MeshUsageError: `argv` is neither a text nor a list, or cannot be split.
    """
    if argv is None:
        return None
    try:
        return tuple(shlex.split(argv) if isinstance(argv, str) else map(str, argv))
    except (TypeError, ValueError) as e:
        raise MeshUsageError(
            f"argv {argv!r} cannot be read as arguments ({e}): write it as in a shell"
        ) from None


def check_expression(expression: str) -> None:
    """Raise an error unless a text is a Python expression that ranks can evaluate.

    Raises:
        MeshUsageError: the text does not compile as an expression.
    """
    try:
        compile(expression.strip(), "<expression>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError) as e:  # the latter of null bytes and lone surrogates
        why = e.msg if isinstance(e, SyntaxError) else str(e)
        words = expression.split()
        is_list = len(words) > 1 and all(map(str.isidentifier, words))
        advice = f"; several values are `{', '.join(words)}`" if is_list else ""
        raise MeshUsageError(f"{expression!r} is no expression: {why}{advice}") from e


class CellSyntaxError(SyntaxError):
    """Raised if the source of a cell for the ranks does not parse."""


class Cell(msgspec.Struct, frozen=True):
    """The parsed source of a cell for the ranks.

    Attributes:
        source: source as typed.
        transformed: Python source, with IPython's magics as calls; "" if only a rank can transform
            it (a single line may be a magic without %, if the rank has no variable of that name).
        code: compiled parts of `transformed`, which run one after the other, as a list for
            `marshal`; b"" if ranks have to compile it.
        awaits: whether it has ``await``, ``async for`` or ``async with`` outside of functions.
    """

    source: str
    transformed: str
    code: bytes
    awaits: bool = False


@functools.cache
def _transformer() -> TransformerManager:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()  # type: ignore[no-untyped-call]


# What IPython might transform in a cell. IPython tokenizes each cell in Python, which takes longer
# than the compiler.
_MAY_BE_SPECIAL = re.compile(
    r"\A\s|^[ \t]+$|^[^\S\n]*(?:>>>|\.\.\.|[%!?,;/])|=\s*[%!]|\?|In \["
    r"|[\r\v\f\x1c-\x1e\x85\u2028\u2029]",
    re.MULTILINE,
)


def _transform(source: str) -> str:
    """Return a cell with IPython's magics and prompts turned into Python."""
    text = source if source.endswith("\n") else f"{source}\n"
    return _transformer().transform_cell(source) if _is_special(text) else text


def _is_special(source: str) -> bool:
    return _MAY_BE_SPECIAL.search(source) is not None


def read_cell(source: str, execution_count: int = 0) -> Cell:
    """Parse the source of a cell for the ranks.

    Args:
        source: source as typed.
        execution_count: n of the cell's name ``In[n]``.

    Raises:
        CellSyntaxError: the source does not parse.
    """
    try:
        is_left = "IPython" not in sys.modules and "await" not in source and "async" not in source
        if is_left and _is_special(source):  # ranks have IPython
            return Cell(source, "", b"")
        transformed = _transform(source)
        if _may_be_automagic(transformed):
            return Cell(source, "", b"")
        code, awaits = _compile(transformed, execution_count)
    except SyntaxError as e:
        line = e.lineno or 0  # the compiler's later stages know the line's number only
        text = e.text or "".join(source.split("\n")[line - 1 : line])
        place = f"In[{execution_count}]", e.lineno, e.offset, text, e.end_lineno, e.end_offset
        raise CellSyntaxError(e.msg, place) from None
    except (ValueError, OverflowError) as e:  # null bytes, absurd literals, lone surrogates
        raise CellSyntaxError(str(e)) from None
    return Cell(source, transformed, code, awaits)


# Cells with these are compiled by ranks: those that await run in a loop, and those with a future
# statement change how later cells are compiled.
_OF_RANKS = (
    inspect.CO_COROUTINE
    | __future__.annotations.compiler_flag
    | __future__.barry_as_FLUFL.compiler_flag
)


def _compile(transformed: str, execution_count: int) -> tuple[bytes, bool]:
    """Compile a cell as IPython does: its statements, and a last expression, whose value is shown.

    Returns:
        The code objects, as a list for `marshal`, b"" if ranks have to compile the cell; and
        whether the cell awaits.

    Raises:
        SyntaxError: the source does not compile.
    """
    flags, parts = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, list[tuple[Any, str]]()
    # As IPython names the file of a cell's code.
    digest = hashlib.sha1(transformed.encode(), usedforsecurity=False).hexdigest()
    file = f"<ipython-input-{execution_count}-{digest[:12]}>"
    # CPython 3.11 raises the former while another thread parses.
    with contextlib.suppress(SystemError, RecursionError):
        tree = compile(transformed, file, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        body: list[Any] = tree.body
        if body and isinstance(body[-1], ast.Expr):
            parts.append((ast.Interactive([body.pop()]), "single"))
        if body or not parts:
            parts.insert(0, (ast.Module(body, []), "exec"))
    codes = [
        compile(part, file, mode, flags, dont_inherit=True, optimize=0)
        for part, mode in parts or [(transformed, "exec")]
    ]
    is_theirs = not parts or any(code.co_flags & _OF_RANKS for code in codes)
    awaits = any(code.co_flags & inspect.CO_COROUTINE for code in codes)
    return (b"" if is_theirs else marshal.dumps(codes)), awaits


def is_async(function: Any) -> bool:
    """Return whether a call of a function returns a coroutine: one of ``async def``, a bound
    method or partial of one, or an object whose ``__call__`` is one.
    """
    code = getattr(function, "__code__", None)
    if code is not None:  # as most have: without a call of Python's
        return bool(code.co_flags & inspect.CO_COROUTINE)
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


# One line, after comments, that begins with a word.
_WORD_AND_REST = re.compile(r"(?:#[^\n]*\n)*([A-Za-z]\w*)(?:[ \t]+([^=\s(\[.,:;][^\n]*))?")


def _may_be_automagic(transformed: str) -> bool:
    """Return whether IPython may interpret a cell, such as ``pwd`` or ``cd /tmp``, as a magic
    without its percent sign.
    """
    match = _WORD_AND_REST.fullmatch(transformed.strip())
    if match is None or keyword.iskeyword(match[1]):
        return False
    try:
        (statement,) = ast.parse(transformed).body
    except (SyntaxError, ValueError):
        return True
    return isinstance(statement, ast.Expr)
