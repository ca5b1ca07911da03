"""Holds back signals while the main thread must not be interrupted, and handles them afterwards.

Python runs the handlers of signals on the main thread, between any two of its steps, and what a
handler raises (KeyboardInterrupt, a time-out of the user's) is raised there. The link's loop would
lose a message.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ...stdlib import threading

# As `signal.signal` and `signal.getsignal`, which make enums of what they are given and give.
_signal = importlib.import_module("_signal")
_set_handler: Callable[[int, Any], Any] = _signal.signal
_handler_of: Callable[[int], Any] = _signal.getsignal
# The standard ones. SIGINT is held first and let go last.
_SIGNALS = (int(_signal.SIGINT), *(number for number in range(1, 32) if number != _signal.SIGINT))


class HeldSignals:
    """Holds back, on the main thread, signals with a Python handler; does nothing on other
    threads.

    Args:
        note: told at once that a signal has come.
    """

    def __init__(self, note: Callable[[], object]) -> None:
        self._tell = note
        self._held: list[tuple[int, Any]] = []  # signal, its handler
        self._noted: list[int] = []
        self._depth = 0
        self._main = threading.main_thread().ident
        self._note_signal = self._note  # one object: it is compared

    @property
    def has_noted(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._noted)

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if self._depth:
            self._depth += 1
            return
        self._noted.clear()
        try:
            for number in _SIGNALS:
                handler = _handler_of(number)
                if callable(handler):
                    self._held.append((number, handler))
                    _set_handler(number, self._note_signal)
        except BaseException:  # of a handler, before its signal was held
            self._restore()
            raise
        self._depth = 1

    def __exit__(self, *exc: object) -> None:
        if threading.get_ident() != self._main:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        self._depth = 0
        handlers = tuple(self._held)
        self._restore()
        if self._noted:  # asked only now: a signal may have come up to the last moment
            noted = self._noted.copy()
            self._noted.clear()
            self._handle(noted, dict(handlers))

    def _handle(self, noted: list[int], handlers: dict[int, Any]) -> None:
        """Call the handlers of these signals, all of them even if one raises."""
        try:
            while noted:
                number = noted.pop(0)
                handlers[number](number, sys._getframe())
        finally:
            if noted:
                self._handle(noted, handlers)

    def _restore(self) -> None:
        """Restore the handlers; a handler may be called, and raise, as soon as it is restored."""
        try:
            while self._held:
                number, handler = self._held[-1]
                if _handler_of(number) == self._note_signal:
                    _set_handler(number, handler)
                del self._held[-1]
        finally:
            if self._held:
                self._restore()

    def _note(self, number: int, frame: object) -> None:
        self._noted.append(number)
        self._tell()
