"""Parses and checks cells, expressions and arguments for the ranks before they are sent."""

from __future__ import annotations

import ast
import functools
import inspect
import keyword
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        is_async: whether it has an ``await`` at top level.
    """

    source: str
    transformed: str
    is_async: bool


@functools.cache
def _transformer() -> TransformerManager:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()  # type: ignore[no-untyped-call]


# What IPython might transform in a cell. IPython tokenizes each cell in Python, which takes longer
# than the compiler.
_MAY_BE_SPECIAL = re.compile(
    r"\A\s|^[ \t]+$|^[ \t]*(?:>>>|\.\.\.|[%!?,;/])|=\s*[%!]|\?|In \["
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
            return Cell(source, "", False)
        code = compile(transformed, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as e:
        raise CellSyntaxError(*e.args) from None
    except (ValueError, OverflowError) as e:  # null bytes, absurd literals, lone surrogates
        raise CellSyntaxError(str(e)) from None
    return Cell(source, transformed, bool(code.co_flags & inspect.CO_COROUTINE))


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
