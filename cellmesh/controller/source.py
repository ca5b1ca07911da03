"""Cells are checked here before they travel: a syntax error is one error, not one a rank."""

from __future__ import annotations

import ast
import functools
from typing import Any


@functools.cache
def _transformer() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()  # type: ignore[no-untyped-call]


class CellSyntaxError(SyntaxError):
    """A cell that was meant for the ranks does not parse."""


def check_source(source: str, execution_count: int = 0) -> None:
    """Check that a cell parses, IPython's magics included.

    Args:
        source: the cell.
        execution_count: the notebook's ``In[n]``, for the error.

    Raises:
        CellSyntaxError: it does not parse.
    """
    name = f"In[{execution_count}]" if execution_count else "cell"
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    try:
        compile(_transformer().transform_cell(source), name, "exec", flags, dont_inherit=True)
    except SyntaxError as e:
        raise CellSyntaxError(*e.args) from None
