"""Times a cell and the collectives in it, from the recorder's ring buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...stdlib import time
from ...wire.trace import in_operations
from ...wire.user_code import Timing

if TYPE_CHECKING:
    from .recorder import Spans


class Stopwatch:
    """Times one cell and the collectives in it, from `start` to `stop`.

    Args:
        recorder: of the rank's collectives.
    """

    def __init__(self, recorder: Spans) -> None:
        self._recorder = recorder
        self._first = 0
        self._began_at = self._added_until = 0.0
        self._in_collectives_s = 0.0

    def start(self) -> None:
        """Note that the cell begins, and begin to add up the time of its collectives."""
        self._first = self._recorder.num_begun
        self._recorder.before_overwriting = self._add_up
        self._began_at = self._added_until = time.monotonic()

    def stop(self) -> Timing:
        """Note that the cell has ended, well or not."""
        self._recorder.before_overwriting = None
        self._add_up()
        return Timing(self._added_until - self._began_at, self._in_collectives_s)

    def _add_up(self) -> None:
        """Add the time of collectives so far: the ring buffer may overwrite some of them next."""
        since, now = self._added_until, time.monotonic()
        spans = ((begin, end) for _, begin, end in self._recorder.begun_since(self._first))
        self._in_collectives_s += in_operations(spans, since, now)
        self._first, self._added_until = self._recorder.num_begun, now
