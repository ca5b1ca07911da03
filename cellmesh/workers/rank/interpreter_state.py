"""Interpreter state that user code changes: the trace function, and the last exception."""

from __future__ import annotations

import sys
from bdb import BdbQuit

from ..exceptions import traceback_of


def stop_tracing() -> None:
    """Remove the trace function at a cell's end, so that cellmesh's own code is not stepped
    through.
    """
    sys.settrace(None)


def remember_error(error: BaseException | None) -> None:
    """Keep the exception of a cell or call, for `post_mortem`; None drops it."""
    if issubclass(type(error), BdbQuit):
        return
    sys.last_type = None if error is None else type(error)
    sys.last_value = sys.last_exc = error  # type: ignore[attr-defined]
    sys.last_traceback = None if error is None else traceback_of(error)
