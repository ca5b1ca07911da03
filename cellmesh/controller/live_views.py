"""The live views of a mesh in a notebook (dashboard, plots), of which only a limited number is kept
up to date.

A view is frozen once its mesh has ended, or once there are too many newer views of its kind.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

# Number of views of a kind that are updated, and of frozen views that are kept: a page that was
# reloaded since shows those, as it does not have the static picture that replaced them.
MAX_LIVE = 8
MAX_STILL = 8


class View(Protocol):
    """Protocol of a live view in a notebook; its methods may be called on any thread."""

    def freeze(self, why: str) -> None:
        """Stop updating the view; its content stays, with a note on the reason."""

    def close(self) -> None:
        """Free the resources of the frozen view."""


class LiveViews:
    """The live views of one mesh; usable on any thread, and never blocked by a view.

    Args:
        max_live: number of views of a kind that are updated.
        max_still: number of further views of a kind that are kept frozen.

    Attributes:
        heading: returns the line to show above a view (`Displays`); None for no line.
    """

    def __init__(self, max_live: int = MAX_LIVE, max_still: int = MAX_STILL) -> None:
        self._max_live, self._max_still = max_live, max_still
        self._views: dict[str, deque[View]] = {}
        self._why = ""
        self.heading: Callable[[bool], str] | None = None
        self._lock = threading.Lock()

    def add(self, kind: str, view: View) -> None:
        """Add a view; freeze the oldest live view of its kind if there are too many.

        Args:
            kind: name of the kind for users, in the plural: "plots".
            view: the view.
        """
        calls: list[Callable[[], None]] = []
        with self._lock:
            views = self._views.setdefault(kind, deque())
            views.append(view)
            if self._why:
                calls.append(partial(view.freeze, self._why))
            if len(views) > self._max_live:
                oldest = views[-1 - self._max_live]
                calls.append(partial(oldest.freeze, f"no longer updated: newer {kind} are"))
            if len(views) > self._max_live + self._max_still:
                calls.append(views.popleft().close)
        do_apart(calls)

    def print_heading(self) -> None:
        """Print the line that names the mesh above a view, if there is one."""
        if self.heading is not None and (text := self.heading(True)):
            print(text)

    def end(self, why: str) -> None:
        """Freeze all views, as the mesh has ended."""
        with self._lock:
            self._why = why
            live = [view for kind in self._views.values() for view in [*kind][-self._max_live :]]
            self._views.clear()
        do_apart([partial(view.freeze, why) for view in live])


def do_apart(calls: Sequence[Callable[[], None]]) -> None:
    """Call functions one after the other on a thread of their own, as drawing views takes long."""

    def do() -> None:
        with contextlib.ExitStack() as stack:  # calls all functions even if one raises
            for call in reversed(calls):
                stack.callback(call)

    if calls:
        with contextlib.suppress(RuntimeError):  # the interpreter exits: no view is left to update
            threading.Thread(target=do, name="cellmesh-shown", daemon=True).start()
