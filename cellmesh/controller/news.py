"""Notifications and replies for which threads and asyncio tasks wait, safe against interrupts.

A signal's handler (Ctrl-C) may raise between any two instructions of the main thread, also within a
condition of `threading` or a future. So no waiting thread holds a lock that the reporting thread
needs, and each waits on a lock of its own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ..stdlib import threading, time

# A signal that arrives just before a thread begins to wait does not end the wait, so the wait is
# divided into steps of this length, between which the handler runs.
LOOK_UP_S = 0.5

_T = TypeVar("_T")


class News:
    """Wakes waiting threads and asyncio tasks after a change that they may wait for.

    Attributes:
        last: a new object after each report.
    """

    def __init__(self) -> None:
        self.last = object()
        self._wakers: deque[Callable[[], object]] = deque()

    def report(self) -> None:
        """Wake all waiting threads and tasks; call this after the change."""
        self.last = object()
        try:
            for _ in range(len(self._wakers)):
                self._wakers.popleft()()
        except IndexError:  # another thread reports as well
            return

    def add(self, wake: Callable[[], object]) -> None:
        """Register a function that the next report calls once; compare `last` after this call to
        notice a report that was made before it.
        """
        self._wakers.append(wake)

    def wait(self, seen: object, timeout_s: float) -> None:
        """Wait until a report has replaced the object `seen` in `last`, for at most `timeout_s`
        seconds.
        """
        bell = threading.Lock()
        bell.acquire()
        self._wakers.append(bell.release)
        is_rung = self.last is not seen or bell.acquire(timeout=max(0.0, timeout_s))
        if not is_rung:
            with contextlib.suppress(ValueError):  # a report is calling it
                self._wakers.remove(bell.release)

    def wait_for(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition holds, checked after each report; return whether it held in time.

        Args:
            is_over: returns whether the condition holds.
            timeout_s: how long to wait, in seconds; None for no limit.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            seen = self.last
            if is_over():
                return True
            left_s = LOOK_UP_S if until is None else until - time.monotonic()
            if left_s <= 0:
                return False
            self.wait(seen, min(left_s, LOOK_UP_S))


class Reply(Generic[_T]):
    """A value or an error that one thread sets once, and for which others wait."""

    def __init__(self) -> None:
        self._news = News()
        self._value: _T | None = None
        self._error: BaseException | None = None
        self._is_given = False

    def give(self, value: _T) -> None:
        """Set the value that `result` returns."""
        self._value = value
        self._note_given()

    def fail(self, error: BaseException) -> None:
        """Set the error that `result` raises."""
        self._error = error
        self._note_given()

    def is_given(self) -> bool:
        """Return whether a value or an error is set."""
        return self._is_given

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a value or an error is set; return whether one was set in time."""
        return self._news.wait_for(self.is_given, timeout_s)

    def result(self, timeout_s: float | None = None) -> _T:
        """Wait for the value, and return it.

        Raises:
            TimeoutError: the value was not set in time.
        """
        if not self.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _note_given(self) -> None:
        self._is_given = True
        self._news.report()
