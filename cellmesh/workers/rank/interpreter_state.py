"""What user code leaves in the interpreter: a trace function, and its last exception."""

from __future__ import annotations

import sys
from bdb import BdbQuit

from ..exceptions import traceback_of


def stop_tracing() -> None:
    """At a cell's end: the code that runs next is not the user's, and is not stepped through."""
    sys.settrace(None)


def remember_error(error: BaseException | None) -> None:
    """Keep what a cell or call has raised, for `post_mortem`; None forgets it."""
    if issubclass(type(error), BdbQuit):
        return
    sys.last_type = None if error is None else type(error)
    sys.last_value = sys.last_exc = error  # type: ignore[attr-defined]
    sys.last_traceback = None if error is None else traceback_of(error)
