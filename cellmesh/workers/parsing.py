"""Parsing in a process whose other threads parse as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
# A parse takes far less than a thread's turn, so that two in a row are hardly disturbed.
_NUM_TRIES = 5


def parse_again(parse: Callable[[], _T]) -> _T:
    """Call a function that makes an AST, again if a parse of another thread has disturbed it.

    CPython 3.11 counts how deep it is in an AST in one place for all threads (Python-ast.c,
    ``ast_state.recursion_depth``). Seen on ranks: the control thread looked for the call that the
    main thread was in, and the main thread's next cell ended with a SystemError.

    Raises:
        SystemError: it was disturbed each time.
    """
    for _ in range(_NUM_TRIES - 1):
        try:
            return parse()
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return parse()
