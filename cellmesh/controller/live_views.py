"""The pictures of a mesh in a notebook (dashboard, plots): which are updated, and which frozen.

A view stands still once its mesh has ended, or newer views of its kind have taken its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

# So many of a kind go on; of those that no longer do, so many can still be seen by a page that was
# loaded again since, and knows nothing of the picture that was left in their place.
MAX_LIVE = 8
MAX_STILL = 8


class View(Protocol):
    """Protocol of a picture in a notebook that is updated; its methods are called on any thread."""

    def freeze(self, why: str) -> None:
        """Stop updating the view; what it shows stays, with a note why."""

    def close(self) -> None:
        """Forget the view, which is frozen."""


class LiveViews:
    """The pictures of one mesh; usable on any thread, and never blocked by one of them.

    Args:
        max_live: how many of a kind are updated.
        max_still: how many more of a kind are kept, standing still.
    """

    def __init__(self, max_live: int = MAX_LIVE, max_still: int = MAX_STILL) -> None:
        self._max_live, self._max_still = max_live, max_still
        self._views: dict[str, deque[View]] = {}
        self._why = ""
        self._lock = threading.Lock()

    def add(self, kind: str, view: View) -> None:
        """Add a view; freeze the oldest live view of its kind if there are too many.

        Args:
            kind: as users call it: "plots".
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

    def end(self, why: str) -> None:
        """Freeze all views: the mesh has ended."""
        with self._lock:
            self._why = why
            live = [view for kind in self._views.values() for view in [*kind][-self._max_live :]]
            self._views.clear()
        do_apart([partial(view.freeze, why) for view in live])


def do_apart(calls: Sequence[Callable[[], None]]) -> None:
    """Call functions one after the other on a thread of their own, as drawing views takes long."""

    def do() -> None:
        with contextlib.ExitStack() as stack:  # each is called, whichever fails
            for call in reversed(calls):
                stack.callback(call)

    if calls:
        with contextlib.suppress(RuntimeError):  # the interpreter ends: nobody is there to be told
            threading.Thread(target=do, name="cellmesh-shown", daemon=True).start()
