"""Parses and checks cells, expressions and arguments for the ranks before they are sent."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import keyword
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MeshUsageError
from ..wire.verbs import CellForm

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
    """Raise an error unless a text is a Python expression.

    Raises:
        MeshUsageError: the text does not parse as an expression.
    """
    try:
        ast.parse(expression.strip(), mode="eval")
    except SyntaxError as e:
        raise MeshUsageError(f"{expression!r} is no expression: {e.msg}") from e


class CellSyntaxError(SyntaxError):
    """Raised if the source of a cell for the ranks does not parse."""


@dataclass(frozen=True)
class Cell:
    """The parsed source of a cell for the ranks.

    Attributes:
        source: source as typed.
        transformed: Python source, with IPython's magics as calls; "" if only a rank can transform
            it (a single line may be a magic without %, if the rank has no variable of that name).
        form: the compiler's mode for `transformed`.
    """

    source: str
    transformed: str
    form: CellForm


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
    return _transformer().transform_cell(source) if _MAY_BE_SPECIAL.search(text) else text


def read_cell(source: str, execution_count: int = 0) -> Cell:
    """Parse the source of a cell for the ranks.

    Args:
        source: source as typed.
        execution_count: the notebook's ``In[n]``, for the error.

    Raises:
        CellSyntaxError: the source does not parse.
    """
    name = f"In[{execution_count}]" if execution_count else "cell"
    try:
        transformed = _transform(source)
        if _may_be_automagic(transformed):
            return Cell(source, "", "")
        form = _form_of(transformed, name)
    except SyntaxError as e:
        raise CellSyntaxError(*e.args) from None
    except (ValueError, OverflowError) as e:  # null bytes, absurd literals, lone surrogates
        raise CellSyntaxError(str(e)) from None
    return Cell(source, transformed, form)


_CONTINUED = re.compile(r"\\\r?\n")


def _form_of(transformed: str, name: str) -> CellForm:
    """Return the compiler's mode for a cell, with which each rank compiles it at once: otherwise it
    first parses the cell, to find its last expression.

    Raises:
        SyntaxError: the source does not compile.
    """
    flags, body = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, None
    parsed: Any = transformed
    # CPython 3.11 raises the former while another thread parses.
    with contextlib.suppress(SystemError, RecursionError):
        parsed = compile(transformed, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        body = parsed.body
    if compile(parsed, name, "exec", flags, dont_inherit=True).co_flags & inspect.CO_COROUTINE:
        return "await"
    if body is None:
        return ""
    if not (body and isinstance(body[-1], ast.Expr)):
        return "exec"
    # With "single", a continued line without code after the expression would be a second statement.
    return "single" if len(body) == 1 and not _CONTINUED.search(transformed) else ""


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
