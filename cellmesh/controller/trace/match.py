"""The last cells on all ranks: which rank computed, was in a collective, and waited for which
rank. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean

from ...wire.trace import covered, cut_out
from .lateness import Lateness, Match, add_up_lateness, describe_lateness, find_straggler


@dataclass(frozen=True)
class TimelineCell:
    """A cell, or a call from Python.

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
        """When the first rank began."""
        return min(begin for begin, _ in self.by_rank.values())

    @property
    def end_ns(self) -> int:
        """When the last rank ended."""
        return max(end for _, end in self.by_rank.values())


@dataclass(frozen=True)
class Operation:
    """A collective or a message on one rank.

    Attributes:
        name: as ``torch.distributed`` calls it.
        group: torch's name of its process group.
        members: the group's ranks; () for all.
        start_ns, duration_ns: from the first cell's begin; one that goes on lasts until now.
        run: of its cell.
        sequence, peer, generation: see `looks`.
        wait_ns: since when the rank's main thread waited for it, as far as that is known; None if
            it did not.
        is_open: it goes on.
        is_launch: on a GPU, of which only the launch is known.
        waited_ns: how long of it the last of its ranks had not come.
        last: the rank that came last; -1 where that is not known.
    """

    name: str
    group: str
    members: tuple[int, ...]
    start_ns: int
    duration_ns: int
    run: int
    sequence: int = 0
    peer: int = -1
    generation: int = 0
    wait_ns: int | None = None
    is_open: bool = False
    is_launch: bool = False
    waited_ns: int = 0
    last: int = -1

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.duration_ns

    @property
    def is_message(self) -> bool:
        """Whether it is a send or receive between two ranks."""
        return self.name in ("send", "recv")


def lanes_of(operations: Iterable[Operation]) -> list[int]:
    """Return a lane for each operation, so that operations in one lane do not overlap."""
    ends: list[int] = []
    lanes = []
    for one in operations:
        lane = next((lane for lane, end in enumerate(ends) if end <= one.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = one.end_ns
        lanes.append(lane)
    return lanes


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
        """The rank that others waited for noticeably; None if there is none."""
        return find_straggler(self.lateness, self.wall_ns / 1e9)


@dataclass(frozen=True)
class History:
    """What ranks did in their last cells.

    Attributes:
        ranks: of which it tells.
        cells: oldest first.
        operations: rank -> its collectives and messages, in the order of their begins.
        matches: which of them are one.
        notes: what is not told, and why.
    """

    ranks: tuple[int, ...] = ()
    cells: tuple[TimelineCell, ...] = ()
    operations: Mapping[int, Sequence[Operation]] = field(default_factory=dict)
    matches: Sequence[Match] = ()
    notes: tuple[str, ...] = ()

    @property
    def length_ns(self) -> int:
        """The length of the drawn history."""
        return max((cell.end_ns - cell.shift_ns for cell in self.cells), default=0)

    @property
    def is_running(self) -> bool:
        """Whether a cell has not ended."""
        return any(cell.running for cell in self.cells)

    @cached_property
    def _by_cell(self) -> dict[tuple[int, int], list[Operation]]:
        found: dict[tuple[int, int], list[Operation]] = {}
        for rank, ours in self.operations.items():
            for one in ours:
                found.setdefault((rank, one.run), []).append(one)
        return found

    def of(self, rank: int, run: int) -> Sequence[Operation]:
        """The operations of a rank in one cell."""
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

    def times(self, cell: TimelineCell) -> CellTimes:
        """Return where the time of a cell went."""
        operations = [self.of(rank, cell.run) for rank in cell.by_rank]
        spans = [[(one.start_ns, one.end_ns) for one in ours] for ours in operations]
        waits = [
            [(one.start_ns, one.start_ns + one.waited_ns) for one in ours] for ours in operations
        ]
        return CellTimes(
            cell.end_ns - cell.begin_ns,
            mean(
                sum(end - begin for begin, end in self.computing(rank, cell))
                for rank in cell.by_rank
            ),
            mean(map(covered, spans)) if spans else 0.0,
            mean(map(covered, waits)) if waits else 0.0,
            self.lateness(cell.run),
        )

    def lateness(self, run: int | None = None) -> dict[int, Lateness]:
        """How late ranks began collectives; messages do not count, because one side always
        waits.

        Args:
            run: of the cell that is asked about; None for all.
        """
        return add_up_lateness(
            self.operations, [one for one in self.matches if self._is_of(one, run)]
        )

    def _is_of(self, one: Match, run: int | None) -> bool:
        rank, index = next(iter(one[0].items()))
        operation = self.operations[rank][index]
        return not operation.is_message and run in (None, operation.run)

    @property
    def straggler(self) -> int | None:
        """The rank that others waited for noticeably; None if there is none."""
        return find_straggler(self.lateness(), self._took_s())

    def describe(self) -> str:
        """Describe the straggler."""
        text = describe_lateness(self.lateness(), self._took_s())
        return text.replace("never came to", "has not come yet to") if self.is_running else text

    def _took_s(self) -> float:
        return sum(cell.end_ns - cell.begin_ns for cell in self.cells) / 1e9

    def __repr__(self) -> str:
        titles = ", ".join(cell.title for cell in self.cells) or "no cell"
        return f"<timeline of {titles} on {len(self.ranks)} ranks>"
