"""Records a rank's last cells and collectives in ring buffers, and times a cell by them.

As the recorder is called for each operation, it writes little, in one place: six numbers, in about
half a microsecond. The ring grows with its use; once it holds `CAPACITY` operations, the oldest are
overwritten. The recorder keeps no reference to a tensor or Work.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...stdlib import time
from ...wire.inspect import HistoryQuery
from ...wire.trace import RECORD, CellSpan, Past, What, in_operations
from ...wire.verbs import Timing

if TYPE_CHECKING:
    from ..run_tracker import RunRecord

# Number of operations that are kept.
CAPACITY = 20_000
_CHUNK = 1_000  # number of operations by which the ring grows
_NAN = math.nan
_NO_RUN = -1
_TIME = struct.Struct("=d")
_SIZE, _END, _WAIT = RECORD.size, 32, 40
_write, _write_time, _read_time = RECORD.pack_into, _TIME.pack_into, _TIME.unpack_from


class Spans:
    """Ring buffers with the times of a rank's last cells and collectives; the main thread records
    begins, any thread may record ends and read.

    One thread at a time begins operations: the main thread, or autograd's while the main one waits.

    Args:
        cells: the last cells and calls, oldest first; another thread may add to them.

    Attributes:
        is_on: whether operations are recorded.
        before_overwriting: called each time that the ring is full and writing restarts at its
            beginning.
    """

    def __init__(self, cells: deque[RunRecord] | None = None) -> None:
        self.is_on = True
        self.before_overwriting: Callable[[], None] | None = None
        self._cells: deque[RunRecord] = deque() if cells is None else cells
        self._num_begun = 0
        self._what: list[What | None] = []
        self._numbers = bytearray()

    @property
    def num_begun(self) -> int:
        """Number of collectives and messages that have begun, which is also the number of the next
        one.
        """
        return self._num_begun

    # ---- writing

    def begin(self, what: What, sequence: int, peer: int, at_s: float, is_waited_for: bool) -> int:
        """Record that a collective or a point-to-point message begins.

        Args:
            what, sequence, peer: as in `Operations`.
            at_s: time of the begin, by ``time.monotonic``.
            is_waited_for: whether the main thread waits for it from its begin on.

        Returns:
            Number of the operation, for `wait` and `end`.
        """
        number = self._num_begun
        slot = number % CAPACITY
        if slot >= len(self._what):
            self._grow()
        elif slot == 0 and self.before_overwriting is not None:
            self.before_overwriting()
        self._what[slot] = what
        wait_s = at_s if is_waited_for else _NAN
        cells = self._cells
        run = cells[-1].run if cells and cells[-1].end_s is None else _NO_RUN
        _write(self._numbers, slot * _SIZE, sequence, peer, run, at_s, _NAN, wait_s)
        self._num_begun = number + 1  # last, so that concurrent readers see complete records
        return number

    def wait(self, number: int, since_s: float | None = None) -> None:
        """Record that the main thread waits for a collective or message, from now on or since a
        given time.
        """
        self._note(number, _WAIT, monotonic() if since_s is None else since_s)

    def end(self, number: int) -> None:
        """Record that a collective or message has ended; further calls for it have no effect.
        Usable on any thread.
        """
        self._note(number, _END, monotonic())

    def _note(self, number: int, offset: int, at_s: float) -> None:
        if 0 <= number < self._num_begun <= number + CAPACITY:
            at = number % CAPACITY * _SIZE + offset
            (before,) = _read_time(self._numbers, at)
            if before != before:  # NaN: not set yet
                _write_time(self._numbers, at, at_s)

    def end_with(self, work: Any, number: int) -> None:
        """Arrange for a collective's end to be recorded when its Work completes, even if no thread
        waits for it.
        """
        try:
            future = work.get_future()
        except Exception:  # the backend has no futures: the wait's end is recorded instead
            return
        future.add_done_callback(lambda _: self.end(number))

    def end_all(self) -> None:
        """Record that all collectives and messages in the ring buffer have ended."""
        for number in range(max(0, self._num_begun - CAPACITY), self._num_begun):
            self.end(number)

    def _grow(self) -> None:
        num = min(_CHUNK, CAPACITY - len(self._what))
        self._numbers.extend(bytes(_SIZE * num))
        self._what += [None] * num

    # ---- reading

    def begun_since(self, first: int) -> list[tuple[What, float, float]]:
        """Return the collectives and messages from a number on that are still in the ring buffer:
        kind, begin and end (NaN if it has not ended).

        To be called by the thread that begins operations.
        """
        found = []
        for number in range(max(first, self._num_begun - CAPACITY), self._num_begun):
            slot = number % CAPACITY
            what = self._what[slot]
            _, _, _, begin_s, end_s, _ = RECORD.unpack_from(self._numbers, slot * _SIZE)
            if what is not None:
                found.append((what, begin_s, end_s))
        return found

    def past(self, subject: HistoryQuery) -> Past:
        """Return a rank's last cells and the collectives in them, in answer to a `HistoryQuery`."""
        now_s = time.monotonic()
        cells = [
            CellSpan(cell.run, cell.name, cell.execution_count, cell.begin_s, cell.end_s)
            for cell in copied(self._cells)[-subject.num_cells :]
        ]
        begun = self._num_begun
        first = max(0, begun - CAPACITY)
        oldest = begun % CAPACITY if first else 0
        since_s = cells[0].begin_s if cells else now_s
        whats = self._what[oldest:begun] + self._what[:oldest]
        numbers = self._numbers[oldest * _SIZE : begun * _SIZE] + self._numbers[: oldest * _SIZE]
        # Number of records overwritten during the copy, including one that may be half written.
        overwritten = min(len(whats), max(0, self._num_begun + 1 - CAPACITY - first))
        kept = [*zip(whats, RECORD.iter_unpack(numbers), strict=True)][overwritten:]
        runs = {cell.run for cell in cells}
        chosen = [(what, row) for what, row in kept if row[2] in runs]
        # The ring may begin later than the cells; the number of lost operations is an upper bound.
        is_cut = first + overwritten > 0 and (not kept or kept[0][1][3] > since_s)
        num_lost = first + overwritten if is_cut else 0
        num_left_out = max(0, len(chosen) - subject.max_operations)
        chosen = chosen[num_left_out:]
        known: dict[What, int] = {}
        return Past(
            tuple(cells),
            what=array("i", [known.setdefault(what, len(known)) for what, _ in chosen if what]),
            whats=tuple(known),
            numbers=b"".join(RECORD.pack(*row) for _, row in chosen),
            num_left_out=num_left_out + num_lost,
            now_s=now_s,
        )


def copied(records: Iterable[Any]) -> list[Any]:
    """Return a copy of a collection that the main thread may change during the copy."""
    while True:
        try:
            return list(records)
        except RuntimeError:
            continue


class Stopwatch:
    """Times one cell and the collectives in it, from `start` to `stop`.

    Args:
        recorder: recorder of the rank's collectives.
    """

    def __init__(self, recorder: Spans) -> None:
        self._recorder = recorder
        self._first = 0
        self._began_at = self._added_until = 0.0
        self._in_collectives_s = 0.0

    def start(self) -> None:
        """Record that a cell begins, and start to add up the time of its collectives."""
        self._first = self._recorder.num_begun
        self._recorder.before_overwriting = self._add_up
        self._began_at = self._added_until = time.monotonic()

    def stop(self) -> Timing:
        """Record the end of the cell, successful or not; return its duration and its time in
        collectives.
        """
        self._recorder.before_overwriting = None
        self._add_up()
        return Timing(self._added_until - self._began_at, self._in_collectives_s)

    def _add_up(self) -> None:
        """Add the time of the cell's collectives so far to the sum, before the ring buffer
        overwrites them.
        """
        since, now = self._added_until, time.monotonic()
        spans = ((begin, end) for _, begin, end in self._recorder.begun_since(self._first))
        self._in_collectives_s += in_operations(spans, since, now)
        self._first, self._added_until = self._recorder.num_begun, now
