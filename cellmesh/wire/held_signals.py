"""Delays signal handlers while the main thread runs code that they must not interrupt."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from threading import get_ident, main_thread
from typing import Any, TypeVar

T = TypeVar("T")
# Like `signal.signal` and `signal.getsignal`, without their conversions to enums.
_signal = importlib.import_module("_signal")
_set_handler: Callable[[int, Any], Any] = _signal.signal
_handler_of: Callable[[int], Any] = _signal.getsignal
# The standard signals except SIGINT, which the rank handles itself.
_SIGNALS = tuple(number for number in range(1, 32) if number != int(_signal.SIGINT))


class HeldSignals:
    """Context manager, for one use, that delays calls of Python signal handlers, except SIGINT's,
    until its end; does nothing on other threads than the main thread.
    """

    def __init__(self) -> None:
        self._held: list[tuple[int, Any]] = []  # signal, its handler
        self._noted: list[int] = []
        self._is_main = get_ident() == main_thread().ident
        self._note_signal = self._note  # one object, as handlers are compared

    def __enter__(self) -> None:
        if not self._is_main:
            return
        try:
            for number in _SIGNALS:
                handler = _handler_of(number)
                if callable(handler):
                    self._held.append((number, handler))
                    _set_handler(number, self._note_signal)
        except BaseException:  # from a handler, before its signal was held
            self._restore()
            raise

    def __exit__(self, *exc: object) -> None:
        if not self._is_main:
            return
        handlers = tuple(self._held)
        self._restore()
        if self._noted:  # checked last, as a signal may arrive until now
            self._handle(self._noted.copy(), dict(handlers))

    def _handle(self, noted: list[int], handlers: dict[int, Any]) -> None:
        """Call the handlers of the signals that were delayed, all of them even if one raises."""
        try:
            while noted:
                number = noted.pop(0)
                handlers[number](number, sys._getframe())
        finally:
            if noted:
                self._handle(noted, handlers)

    def _restore(self) -> None:
        """Restore the held signals' handlers; each may be called, and raise, from then on."""
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


def hold_back(act: Callable[[], T], report: Callable[[BaseException], object]) -> T:
    """Run a function on a rank's main thread, and delay signal handlers of user code, such as a
    timer's, until it returns. SIGINT is not delayed: the rank handles it itself.

    Args:
        act: function to run.
        report: called with each exception that a handler raises before `act` begins or after it.
    """
    held = HeldSignals()
    raised: list[BaseException] = []
    while True:
        try:
            held.__enter__()
            break
        except BaseException as error:
            raised.append(error)
    try:
        for each in raised:
            report(each)
        return act()
    finally:
        after: list[BaseException] = []
        try:
            held.__exit__()
        except BaseException as error:
            after.append(error)
        for each in after:  # held again: the report takes longer than a short timer
            hold_back(functools.partial(report, each), lambda another: None)
