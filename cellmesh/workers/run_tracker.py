"""Knows which run a rank's code belongs to; has one record a cell or call, set once at its begin.

Output, spans, progress bars and questions are not told of a run's begin and end: with ten
that are, a call costs ten times what it does.
"""

from __future__ import annotations

import collections
import contextvars
from typing import Any

import msgspec

from ..stdlib import threading

# How many of the last cells and calls are remembered.
MAX_RUNS = 1_000
_MAX_NAME = 80
# The modules of what magics call on ranks.
_OURS = ("cellmesh.controller.", "cellmesh.magics.")

_run_of_context: contextvars.ContextVar[int] = contextvars.ContextVar("cellmesh_run")


class RunRecord(msgspec.Struct):
    """A cell or call that has begun on this rank."""

    run: int
    name: str  # of the called function, "" of a cell
    execution_count: int  # the cell's ``In[n]``, 0 of a call
    begin_s: float  # by ``time.monotonic``
    end_s: float | None = None  # None as long as it goes on


class RunTracker:
    """Knows which run the calling code belongs to."""

    def __init__(self) -> None:
        self.main_run = -1  # what the main thread executes: a cell, a call, any other work
        # The last cells and calls, the newest last.
        self.records: collections.deque[RunRecord] = collections.deque(maxlen=MAX_RUNS)
        self._main_thread = threading.main_thread().ident

    def enter(self, run: int) -> None:
        """Note that the main thread begins a run; it ends the run by setting `main_run` to -1."""
        self.main_run = run
        _run_of_context.set(run)

    def current(self) -> int:
        """Return the run that the calling thread or task belongs to, -1 if none is known."""
        run = _run_of_context.get(None)
        if run is None:
            run = getattr(threading.current_thread(), "_cellmesh_run", None)
        elif self.main_run < 0 and threading.get_ident() == self._main_thread:
            return -1  # its context is that of the last run until the next
        return self.main_run if run is None else run

    def copy_records(self) -> list[RunRecord]:
        """Return the records of the last cells and calls; on any thread."""
        while True:
            try:
                return list(self.records)
            except RuntimeError:  # one has begun meanwhile
                continue

    def follow_threads(self) -> None:
        """Patch `threading` so that a thread belongs to the run that starts it."""
        start = threading.Thread.start

        def start_in_run(thread: threading.Thread) -> None:
            thread._cellmesh_run = self.current()  # type: ignore[attr-defined]
            start(thread)

        threading.Thread.start = start_in_run  # type: ignore[method-assign, assignment]


def name_of(function: Any) -> str:
    """Return a name for a called function, as the user knows it; "" for one of the notebook's side
    of this package, such as that of `%dist_seed`, which no user has called.
    """
    module = getattr(function, "__module__", None)
    if isinstance(module, str) and module.startswith(_OURS):
        return ""
    name = getattr(function, "__qualname__", None)
    known = name if isinstance(name, str) else type(function).__name__
    known = known.rpartition("<locals>.")[2].replace("<lambda>", "lambda")  # in HTML a tag
    return known[-_MAX_NAME:] or "a call"
