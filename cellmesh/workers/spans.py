"""What a rank did lately: its cells and its collectives, kept in rings.

Written with each operation, so what is written is little: a number into each of a few arrays, about a
microsecond in all. The arrays are of one length and grow with their use; once they have `CAPACITY`, the
oldest operations are overwritten. Nothing here holds on to tensors or to a Work.
"""

from __future__ import annotations

import collections
import math
import time
from array import array
from typing import Any

from ..wire.looks import CellSpan, History, Operations, Past, What

# How many operations are kept, and how many cells.
CAPACITY, MAX_CELLS = 20_000, 1_000
_CHUNK = 1_000  # by how many the arrays grow
_MAX_NAME = 80
_NAN = math.nan
_NO_RUN = -1


class Spans:
    """The rank's recent past. Written by the main thread, ends also by others; read by any.

    Operations are begun by one thread at a time: the main thread, or autograd's while that waits.

    Attributes:
        is_on: whether operations are noted.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._since_s = time.monotonic()
        self._run = _NO_RUN
        self._cells: collections.deque[_Cell] = collections.deque(maxlen=MAX_CELLS)
        self._num_begun = self._num_done = 0
        self._what: list[What | None] = []
        self._sequence, self._peer, self._runs = array("q"), array("i"), array("q")
        self._begin, self._end, self._wait = array("d"), array("d"), array("d")

    # Cells.

    def begin_cell(self, run: int, name: str, execution_count: int) -> None:
        """A cell begins, or a call."""
        self._run = run
        self._cells.append(_Cell(run, name, execution_count))

    def end_cell(self) -> None:
        """It has ended, well or not."""
        self._run = _NO_RUN
        self._cells[-1].end_s = time.monotonic()

    # Operations.

    def begin(self, what: What, sequence: int, peer: int, at_s: float, is_waited_for: bool) -> int:
        """An operation begins.

        Args:
            what, sequence, peer: see `Operations`.
            at_s: when, by ``time.monotonic``.
            is_waited_for: the main thread waits for it from its begin on.

        Returns:
            Its number, for `wait` and `end`.
        """
        number = self._num_begun
        slot = number % CAPACITY
        if slot == len(self._begin) and number < CAPACITY:
            self._grow()
        # First of all, and `_num_done` last: who reads meanwhile leaves out an operation of mixed numbers.
        self._num_begun = number + 1
        self._what[slot] = what
        self._sequence[slot] = sequence
        self._peer[slot] = peer
        self._runs[slot] = self._run
        self._begin[slot] = at_s
        self._end[slot] = _NAN
        self._wait[slot] = at_s if is_waited_for else _NAN
        self._num_done = number + 1
        return number

    def wait(self, number: int) -> None:
        """The main thread waits for an operation from now on."""
        slot = number % CAPACITY
        if self._is_kept(number) and self._wait[slot] != self._wait[slot]:  # NaN
            self._wait[slot] = time.monotonic()

    def end(self, number: int) -> None:
        """An operation has ended; what comes later does not count. From any thread."""
        slot = number % CAPACITY
        if self._is_kept(number) and self._end[slot] != self._end[slot]:
            self._end[slot] = time.monotonic()

    def end_with(self, work: Any, number: int) -> None:
        """Have an operation end when its Work does, whoever waits for that, and if nobody does."""
        try:
            future = work.get_future()
        except Exception:  # a backend without: its end is that of the wait for it
            return
        future.add_done_callback(lambda _: self.end(number))

    def end_all(self) -> None:
        """All operations have ended."""
        now_s = time.monotonic()
        for slot, end_s in enumerate(self._end):
            if end_s != end_s and self._begin[slot]:
                self._end[slot] = now_s

    def _is_kept(self, number: int) -> bool:
        return 0 <= number < self._num_begun <= number + CAPACITY

    def _grow(self) -> None:
        num = min(_CHUNK, CAPACITY - len(self._begin))
        self._what += [None] * num
        self._peer.frombytes(bytes(self._peer.itemsize * num))
        for numbers in (self._sequence, self._runs, self._begin, self._end, self._wait):
            numbers.frombytes(bytes(numbers.itemsize * num))

    # Reading them.

    def past(self, subject: History) -> Past:
        """The last cells and their operations."""
        now_s = time.monotonic()
        cells = [cell.span() for cell in self._copy_cells()[-subject.num_cells :]]
        done = self._num_done
        first = max(0, done - CAPACITY)
        oldest = done % CAPACITY if first else 0
        since_s = cells[0].begin_s if cells else now_s

        def in_order(column: Any) -> Any:
            return column[oldest:] + column[:oldest] if first else column[:done]

        whats = in_order(self._what)
        columns = [
            in_order(column)
            for column in (self._sequence, self._peer, self._runs, self._begin, self._end, self._wait)
        ]
        overwritten = max(0, self._num_begun - CAPACITY - first)  # while they were copied
        runs = {cell.run for cell in cells}
        begins = columns[3]
        chosen = [
            index
            for index in range(overwritten, len(whats))
            if begins[index] >= since_s and columns[2][index] in runs
        ]
        # The ring may begin later than the cells; what is lost of them is not counted one by one.
        is_cut = first + overwritten > 0 and (overwritten >= len(whats) or begins[overwritten] > since_s)
        num_lost = first + overwritten if is_cut else 0
        num_left_out = max(0, len(chosen) - subject.max_operations)
        chosen = chosen[num_left_out:]
        return Past(
            tuple(cells),
            _pack([whats[index] for index in chosen], [[c[index] for index in chosen] for c in columns]),
            num_left_out + num_lost,
            self._since_s,
            now_s,
        )

    def _copy_cells(self) -> list[_Cell]:
        while True:
            try:
                return list(self._cells)
            except RuntimeError:  # a cell has begun meanwhile
                continue


class _Cell:
    """A cell that has begun."""

    def __init__(self, run: int, name: str, execution_count: int) -> None:
        self.run, self.name, self.execution_count = run, name, execution_count
        self.begin_s = time.monotonic()
        self.end_s: float | None = None

    def span(self) -> CellSpan:
        return CellSpan(self.run, self.name, self.execution_count, self.begin_s, self.end_s)


def _pack(whats: list[What | None], columns: list[list[Any]]) -> Operations:
    known: dict[What | None, int] = {}
    what = array("i", [known.setdefault(one, len(known)) for one in whats])
    sequence, peer, run, begin, end, wait = columns
    return Operations(
        tuple(one for one in known if one is not None),
        what,
        array("q", sequence),
        array("i", peer),
        array("q", run),
        array("d", begin),
        array("d", end),
        array("d", wait),
    )


def name_of(function: Any) -> str:
    """What a called function is called."""
    name = getattr(function, "__qualname__", None)
    return (name if isinstance(name, str) else type(function).__name__)[-_MAX_NAME:] or "a call"
