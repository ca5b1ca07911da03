"""Times a cell, and how long it was in collectives. Imported when a cell is timed, and not
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch._C._distributed_c10d import Work

from ...stdlib import time
from ...wire.messages import Timing
from ..groups.groups import Groups
from ..groups.ledger import Ledger

# (begin, end) by the monotonic clock; one that has not ended has no end.
Span = tuple[float, float | None]


class _TimedLedger(Ledger):
    """Tells of each operation that is begun; a ledger is one while a cell is timed."""

    note: Callable[[float, Any], None]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "last":
            since, find_work = (value[2], value[3]) if value is not None else (0.0, None)
            self.note(since, find_work)


class Stopwatch:
    """Times one cell, from `start` to `stop`.

    Args:
        groups: the rank's process groups.
    """

    def __init__(self, groups: Groups) -> None:
        self._ledger = groups.ledger
        self._ends: list[list[float | None]] = []
        self._began_at = 0.0

    def start(self) -> None:
        """The cell begins."""
        if type(self._ledger) is Ledger:  # else it is being profiled
            self._ledger.__class__ = _TimedLedger
            self._ledger.note = self._note  # type: ignore[attr-defined]
        self._began_at = time.monotonic()

    def stop(self) -> Timing:
        """The cell has ended, well or not."""
        now = time.monotonic()
        ledger: Ledger = self._ledger
        if type(ledger) is _TimedLedger:
            ledger.__class__ = Ledger  # type: ignore[assignment]
            del ledger.note
        spans = [(begin, end) for begin, end in self._ends if begin is not None]
        return Timing(now - self._began_at, add_up(spans, now))

    def _note(self, since: float, find_work: Callable[[], Work | None] | None) -> None:
        """An operation was begun (`since`), got its Work, or, begun and ended in one, is over
        (neither).
        """
        if not since:
            if self._ends and self._ends[-1][1] is None:
                self._ends[-1][1] = time.monotonic()
        elif find_work is None:
            self._ends.append([since, None])
        elif (work := find_work()) is not None and self._ends:
            _on_end(work, self._ends[-1])


def _on_end(work: Work, span: list[float | None]) -> None:
    def end(future: Any) -> None:
        span[1] = time.monotonic()

    try:
        work.get_future().add_done_callback(end)
    except (
        Exception
    ):  # a backend without: it is taken to go on to the cell's end, unless it is over
        if work.is_completed():
            span[1] = time.monotonic()


def add_up(spans: Iterable[Span], now: float) -> float:
    """How long at least one of some spans lasted, in seconds."""
    total, reached = 0.0, 0.0
    for begin, end in sorted(spans, key=lambda span: span[0]):
        end = min(now, now if end is None else end)
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
