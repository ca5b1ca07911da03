"""Catches and reports exceptions of cellmesh's own handlers, so that the calling loop continues."""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# The same line may fail with every message: its first reports are enough.
_MAX_REPORTS = 3


class Faults:
    """Catches, counts and reports exceptions of the functions that one loop calls.

    Args:
        owner: name of the loop's owner in reports, such as ``the mesh's agent``.
        report: called with the text of each report; its exceptions are ignored.

    Attributes:
        num: number of caught exceptions.
        last: last caught exception; None before the first.
    """

    def __init__(self, owner: str, report: Callable[[str], object]) -> None:
        self.num = 0
        self._owner = owner
        self._report = report
        self._counts: collections.Counter[tuple[tuple[str, int | None], ...]] = (
            collections.Counter()
        )

    def attempt(self, function: Callable[[], T], otherwise: T) -> T:
        """Return a function's result; if it raises, report the exception and return `otherwise`."""
        try:
            return function()
        except Exception as error:
            self.take(error)
            return otherwise

    def guard(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function, and report an exception that it raises."""
        try:
            function(*args)
        except Exception as error:
            self.take(error)

    def take(self, error: BaseException) -> None:
        """Count an exception, and report it unless exceptions with the same traceback were reported
        often enough.
        """
        path = tuple(
            (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
        )
        self.num += 1
        self._counts[path] += 1
        if self._counts[path] <= _MAX_REPORTS:
            text = "".join(traceback.format_exception(error)).rstrip()
            with contextlib.suppress(Exception):
                self._report(
                    f"{self._owner} met an error at {path[-1][0]}:{path[-1][1]} and goes on; what "
                    f"it was doing may be missing. Please report it:\n{text}"
                )
