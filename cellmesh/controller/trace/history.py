"""The timeline of the last cells: when each rank computed, was in a collective, and waited for
which rank. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean

from ...wire.trace import cut_out, in_operations
from ..core.clocks import ClockOffset
from .lateness import Lateness, add_up_lateness, describe_lateness, find_straggler
from .operations import Match, Operation


@dataclass(frozen=True)
class TimelineCell:
    """When a cell, or a call from Python, ran on each rank.

    Attributes:
        run: its number.
        title: ``In[3]``, or what was called.
        by_rank: rank -> begin and end, in nanoseconds from the first cell's begin.
        running: the ranks on which it goes on; their end is now.
        shift_ns: by how much it is drawn earlier, as nothing ran before it.
    """

    run: int
    title: str
    by_rank: Mapping[int, tuple[int, int]]
    running: frozenset[int] = frozenset()
    shift_ns: int = 0

    @property
    def begin_ns(self) -> int:
        """When the first rank began the cell."""
        return min(begin for begin, _ in self.by_rank.values())

    @property
    def end_ns(self) -> int:
        """When the last rank ended the cell."""
        return max(end for _, end in self.by_rank.values())


@dataclass(frozen=True)
class CellTimes:
    """Where the time of a cell went, in nanoseconds.

    Attributes:
        wall_ns: from the first rank's begin to the last one's end.
        compute_ns: outside of what its main thread waited for, on average over the ranks.
        collectives_ns: with a collective or a message under way, on average.
        waiting_ns: of that, with another rank not there yet, on average.
        lateness: who came last.
    """

    wall_ns: int
    compute_ns: float
    collectives_ns: float
    waiting_ns: float
    lateness: Mapping[int, Lateness]

    @property
    def straggler(self) -> int | None:
        """The rank that began collectives noticeably later than the others; None if there is
        none.
        """
        return find_straggler(self.lateness, self.wall_ns / 1e9)


@dataclass(frozen=True)
class History:
    """What ranks did in their last cells, as the timeline draws it.

    Attributes:
        ranks: of which it tells.
        cells: oldest first.
        operations: rank -> its collectives and messages, in the order of their begins.
        matches: which of them are one.
        notes: what is not told, and why.
        clocks: rank -> the offset of its host's clock, on many hosts; times are on one clock.
    """

    ranks: tuple[int, ...] = ()
    cells: tuple[TimelineCell, ...] = ()
    operations: Mapping[int, Sequence[Operation]] = field(default_factory=dict)
    matches: Sequence[Match] = ()
    notes: tuple[str, ...] = ()
    clocks: Mapping[int, ClockOffset] = field(default_factory=dict)

    @property
    def length_ns(self) -> int:
        """The time from the begin of the first cell to the end of the last, as drawn."""
        return max((cell.end_ns - cell.shift_ns for cell in self.cells), default=0)

    @property
    def is_running(self) -> bool:
        """Whether a cell of the history has not ended."""
        return any(cell.running for cell in self.cells)

    @cached_property
    def _by_cell(self) -> dict[tuple[int, int], list[Operation]]:
        found: dict[tuple[int, int], list[Operation]] = {}
        for rank, ours in self.operations.items():
            for one in ours:
                found.setdefault((rank, one.run), []).append(one)
        return found

    def of(self, rank: int, run: int) -> Sequence[Operation]:
        """Return the operations of a rank in one cell."""
        return self._by_cell.get((rank, run), ())

    def computing(self, rank: int, cell: TimelineCell) -> list[tuple[int, int]]:
        """Return when a rank was in a cell without waiting for an operation: (begin, end)."""
        if rank not in cell.by_rank:
            return []
        begin, end = cell.by_rank[rank]
        blocked = [
            (one.wait_ns, one.end_ns) for one in self.of(rank, cell.run) if one.wait_ns is not None
        ]
        return cut_out([(begin, end)], blocked)

    def in_collectives_ns(self, rank: int, cell: TimelineCell) -> int:
        """Return for how long of a cell a rank had operations under way that the cell began."""
        spans = ((one.start_ns, one.end_ns) for one in self.of(rank, cell.run))
        return in_operations(spans, *cell.by_rank[rank]) if rank in cell.by_rank else 0

    def waiting_ns(self, rank: int, cell: TimelineCell) -> int:
        """Return for how long of that another rank had not begun them."""
        spans = ((one.start_ns, one.start_ns + one.waited_ns) for one in self.of(rank, cell.run))
        return in_operations(spans, *cell.by_rank[rank]) if rank in cell.by_rank else 0

    def times(self, cell: TimelineCell) -> CellTimes:
        """Return where the time of a cell went."""
        return CellTimes(
            cell.end_ns - cell.begin_ns,
            mean(
                sum(end - begin for begin, end in self.computing(rank, cell))
                for rank in cell.by_rank
            ),
            mean(self.in_collectives_ns(rank, cell) for rank in cell.by_rank),
            mean(self.waiting_ns(rank, cell) for rank in cell.by_rank),
            self.lateness(cell.run),
        )

    def lateness(self, run: int | None = None) -> dict[int, Lateness]:
        """Return how late ranks began collectives; messages do not count, because one side always
        waits.

        Args:
            run: of the cell that is asked about; None for all.
        """
        return add_up_lateness(
            self.operations, [one for one in self.matches if self._is_of(one, run)]
        )

    def _is_of(self, one: Match, run: int | None) -> bool:
        rank, index = next(iter(one[0].items()))
        return run in (None, self.operations[rank][index].run)

    @property
    def straggler(self) -> int | None:
        """The rank that began collectives noticeably later than the others; None if there is
        none.
        """
        return find_straggler(self.lateness(), self._took_s())

    def describe(self) -> str:
        """Describe the rank that began collectives noticeably late; "" if there is none."""
        text = describe_lateness(self.lateness(), self._took_s())
        return text.replace("never began", "has not begun") if self.is_running else text

    def _took_s(self) -> float:
        return sum(cell.end_ns - cell.begin_ns for cell in self.cells) / 1e9

    def __repr__(self) -> str:
        titles = ", ".join(cell.title for cell in self.cells) or "no cell"
        return f"<timeline of {titles} on {len(self.ranks)} ranks>"
