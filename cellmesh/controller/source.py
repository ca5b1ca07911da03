"""Parses cells in the notebook: a syntax error is one error, not one on each rank.

What reading yields travels along, so that eight ranks need not do it again.
"""

from __future__ import annotations

import ast
import functools
import inspect
import keyword
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.inputtransformer2 import TransformerManager


class CellSyntaxError(SyntaxError):
    """A cell for the ranks does not parse."""


@dataclass(frozen=True)
class Cell:
    """A parsed cell.

    Attributes:
        source: as typed.
        transformed: as Python, IPython's magics turned into calls; "" where only a rank can tell (a
            single line may be a magic without its %, if no variable of the rank has its name).
        is_async: whether it awaits at top level.
    """

    source: str
    transformed: str
    is_async: bool


@functools.cache
def _transformer() -> TransformerManager:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()  # type: ignore[no-untyped-call]


def read_cell(source: str, execution_count: int = 0) -> Cell:
    """Parse a cell.

    Args:
        source: as typed.
        execution_count: the notebook's ``In[n]``, for the error.

    Raises:
        CellSyntaxError: it does not parse.
    """
    name = f"In[{execution_count}]" if execution_count else "cell"
    try:
        transformed = _transformer().transform_cell(source)
        if _may_be_automagic(transformed):
            return Cell(source, "", False)
        code = compile(transformed, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as e:
        raise CellSyntaxError(*e.args) from None
    except (ValueError, OverflowError) as e:  # null bytes, absurd literals, lone surrogates
        raise CellSyntaxError(str(e)) from None
    return Cell(source, transformed, bool(code.co_flags & inspect.CO_COROUTINE))


# One line, after comments, of a word and perhaps more.
_WORD_AND_REST = re.compile(r"(?:#[^\n]*\n)*([A-Za-z]\w*)(?:[ \t]+([^=\s(\[.,:;][^\n]*))?")


def _may_be_automagic(transformed: str) -> bool:
    """Whether IPython might take a cell, such as ``pwd`` or ``cd /tmp``, for a magic without its
    percent sign.
    """
    match = _WORD_AND_REST.fullmatch(transformed.strip())
    if match is None or keyword.iskeyword(match[1]):
        return False
    try:
        (statement,) = ast.parse(transformed).body
    except (SyntaxError, ValueError):
        return True
    return isinstance(statement, ast.Expr)
