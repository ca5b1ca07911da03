"""Decides when a widget is refreshed: after each cell, or each second while a cell runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

# Period of refreshes while a cell runs, in seconds.
PERIOD_S = 1.0

# Reason of a refresh: the user requested it; a cell has ended; a cell runs.
Occasion = Literal["asked", "after", "during"]


def pause_after(took_s: float, period_s: float) -> float:
    """Return the pause after a refresh, in seconds, so that refreshes take at most about a tenth of
    the time.
    """
    return max(period_s, 10 * took_s)


class Worker:
    """Calls functions one after the other, on a thread that exists only while functions wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[object, Callable[[], None]] = {}
        self._is_running = False

    def do(self, job: Callable[[], None], key: object = None) -> None:
        """Call a function on the thread; it replaces a waiting function with the same key."""
        with self._lock:
            self._jobs[key if key is not None else object()] = job
            if self._is_running:
                return
            self._is_running = True
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="cellmesh-widget", daemon=True).start()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        except BaseException:
            self._start()  # the waiting functions are called all the same
            raise

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._jobs:
                self._is_running = False
                return None
            return self._jobs.pop(next(iter(self._jobs)))


class AutoRefresh:
    """Refreshes a widget after cells, and while they run.

    Args:
        refresh: refreshes the view, given the reason.
        is_busy: returns whether ranks run anything.
        is_seen: returns whether the view is on a user's screen; if not, it is refreshed once it is.
        events: events of the shell; None without a shell.
        period_s: time from one refresh to the next while a cell runs, in seconds.

    Attributes:
        watches: whether to refresh after each cell.
        follows: whether to refresh while a cell runs.
    """

    def __init__(
        self,
        refresh: Callable[[Occasion], None],
        is_busy: Callable[[], bool],
        is_seen: Callable[[], bool],
        events: Any = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self.watches = False
        self.follows = False
        self._refresh = refresh
        self._is_busy = is_busy
        self._is_seen = is_seen
        self._events = events
        self._period_s = period_s
        self._worker = Worker()
        self._lock = threading.Lock()
        self._is_registered = False
        self._follower: threading.Thread | None = None
        self._cell_runs = False
        self._is_closed = threading.Event()
        self._is_stale = False

    def set(self, watches: bool, follows: bool) -> None:
        """Choose whether to refresh after cells (`watches`) and while they run (`follows`)."""
        self.watches, self.follows = watches, follows
        if self._is_closed.is_set():
            return
        self._register(watches or follows)
        if follows and self._is_busy():
            self._follow()

    def note_seen(self) -> None:
        """Refresh a widget that is visible again, if it has missed a refresh."""
        if self._is_stale:
            self._do("after")
        if self.follows and self._is_busy():
            self._follow()

    def now(self) -> None:
        """Refresh the widget on another thread, on the user's request."""
        self._do("asked")

    def pause(self) -> None:
        """Ignore cells until `set` is called, as no page shows the widget (on any thread)."""
        self._register(False)
        self._is_stale = True

    def close(self) -> None:
        """Stop refreshing the widget for good; callable on any thread."""
        self._is_closed.set()
        self._register(False)

    def before_cell(self, *_: Any) -> None:
        """Handle the begin of a cell of the notebook."""
        self._cell_runs = True
        if self.follows:
            self._follow()

    def after_cell(self, *_: Any) -> None:
        """Handle the end of a cell of the notebook; runs that it began may continue."""
        was_seen_to_begin, self._cell_runs = self._cell_runs, False
        if not was_seen_to_begin:  # the cell that shows the widget
            return
        if not (self.watches or self.follows):
            return
        if self._is_busy():
            # The follower refreshes once the ranks are idle: with --watch alone, only then.
            self._follow()
        self._refresh_or_wait()

    def _refresh_or_wait(self) -> None:
        if self._is_seen():
            self._do("after")
        else:
            self._is_stale = True

    def _do(self, occasion: Occasion) -> None:
        self._is_stale = False
        self._worker.do(lambda: self._refresh(occasion), "refresh")

    def _register(self, wanted: bool) -> None:
        with self._lock:
            if self._events is None or wanted == self._is_registered:
                return
            self._is_registered = wanted
            change = self._events.register if wanted else self._events.unregister
            change("pre_run_cell", self.before_cell)
            change("post_run_cell", self.after_cell)

    def _follow(self) -> None:
        with self._lock:
            if self._follower is not None or self._is_closed.is_set():
                return
            self._follower = threading.Thread(
                target=self._run, name="cellmesh-follower", daemon=True
            )
            self._follower.start()

    def _run(self) -> None:
        pause = self._period_s
        try:
            while not self._is_closed.wait(pause):
                begin = time.monotonic()
                is_busy = self._is_busy()
                if not is_busy and not self._cell_runs:
                    break
                if self.follows and is_busy and self._is_seen():
                    self._refresh("during")
                pause = pause_after(time.monotonic() - begin, self._period_s)
        finally:
            with self._lock:
                self._follower = None
        if not self._is_closed.is_set():
            self._refresh_or_wait()
