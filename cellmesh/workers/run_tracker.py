"""Determines the run (cell or call) in which code of a rank executes, also on other threads; keeps
a record of each run.

The current run is set once, when it begins. Output, spans, progress bars and questions read it, and
are not notified of begins and ends: ten notified objects would make a call ten times as expensive.
"""

from __future__ import annotations

import collections
import contextvars
from typing import Any

import msgspec

from ..stdlib import threading

# Number of recorded cells and calls.
MAX_RUNS = 1_000
_MAX_NAME = 80
# `RunTracker.main_run` while the main thread waits in its event loop: code belongs to its context.
IN_LOOP = -2
# Modules of functions that magics call on ranks.
_OURS = ("cellmesh.controller.", "cellmesh.magics.")

_run_of_context: contextvars.ContextVar[int] = contextvars.ContextVar("cellmesh_run")


class RunRecord(msgspec.Struct):
    """The record of a cell or call that has begun on this rank."""

    run: int
    name: str  # name of the called function, "" for a cell
    execution_count: int  # ``In[n]`` of the cell, 0 for a call
    begin_s: float  # by ``time.monotonic``
    end_s: float | None = None  # None until it ends


class RunTracker:
    """Determines the run (cell or call) in which the calling code executes, on any thread."""

    def __init__(self) -> None:
        self.main_run = -1  # run of the main thread: a cell, a call, or other work
        # The last cells and calls, oldest first.
        self.records: collections.deque[RunRecord] = collections.deque(maxlen=MAX_RUNS)
        self._main_thread = threading.main_thread().ident

    def enter(self, run: int) -> None:
        """Record that the main thread begins a run; the caller ends it by `main_run` = -1."""
        self.main_run = run
        _run_of_context.set(run)

    def current(self) -> int:
        """Return the number of the run to which the calling thread or asyncio task belongs; -1 if
        unknown.
        """
        run = _run_of_context.get(None)
        if run is None:
            run = getattr(threading.current_thread(), "_cellmesh_run", None)
        elif self.main_run == -1 and threading.get_ident() == self._main_thread:
            return -1  # between runs, the main thread's context is still the last run's
        return max(-1, self.main_run) if run is None else run

    def follow_threads(self) -> None:
        """Patch `threading` so that a new thread belongs to the run in which it is started."""
        start = threading.Thread.start

        def start_in_run(thread: threading.Thread) -> None:
            thread._cellmesh_run = self.current()  # type: ignore[attr-defined]
            start(thread)

        threading.Thread.start = start_in_run  # type: ignore[method-assign, assignment]


def name_of(function: Any) -> str:
    """Return a called function's name to show to users; "" for cellmesh's own functions that a
    magic such as `%dist_seed` calls.
    """
    module = getattr(function, "__module__", None)
    if isinstance(module, str) and module.startswith(_OURS):
        return ""
    name = getattr(function, "__qualname__", None)
    known = name if isinstance(name, str) else type(function).__name__
    known = known.rpartition("<locals>.")[2].replace("<lambda>", "lambda")  # else an HTML tag
    return known[-_MAX_NAME:] or "a call"
