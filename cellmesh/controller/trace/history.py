"""The timeline of the last cells: when each rank computed, was in a collective, and waited for
which rank.

Operations of several ranks belong to one collective if they have the same process group and the
same sequence number in it; a rank that begins a collective early waits for the last rank. All ranks
of a host share a clock; the clocks of other hosts are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple

from ...wire.inspect import Refusal
from ...wire.ranks import describe_groups
from ...wire.trace import RECORD, CellSpan, Past, cut_out, in_operations
from ..core.clocks import ClockOffset, describe_clocks
from .operations import (
    Lateness,
    Operation,
    describe_lateness,
    find_straggler,
    lateness_of,
    with_waits,
)

# Maximum drawn length of a pause between cells, as a fraction of the total time in cells.
_GAP = 0.02
NO_CLOCKS: Mapping[int, ClockOffset] = MappingProxyType({})
# Rank -> intervals in which its GPU computed, in seconds of the rank's clock.
Busy = Mapping[int, Sequence[tuple[float, float]]]
_NEVER_BUSY: Busy = MappingProxyType({})


@dataclass(frozen=True)
class TimelineCell:
    """The interval in which a cell, or a call from Python, ran on each rank.

    Attributes:
        run: number of the run.
        title: ``In[3]``, or the name of the called function.
        by_rank: rank -> start and end, in nanoseconds from the start of the first cell.
        running: ranks that have not ended the cell; their end is the time of the query.
        shift_ns: by how much the cell is drawn earlier, as long pauses before it are shortened.
    """

    run: int
    title: str
    by_rank: Mapping[int, tuple[int, int]]
    running: frozenset[int] = frozenset()
    shift_ns: int = 0

    @property
    def begin_ns(self) -> int:
        """The time at which the first rank began the cell."""
        return min(begin for begin, _ in self.by_rank.values())

    @property
    def end_ns(self) -> int:
        """The time at which the last rank ended the cell."""
        return max(end for _, end in self.by_rank.values())


class Times(NamedTuple):
    """A rank's time in a cell by activity, in nanoseconds.

    Attributes:
        compute_ns: time in which the main thread did not wait for an operation; for a profiled
            GPU, time in which the GPU computed.
        collectives_ns: time with at least one collective or message of the cell under way.
        waiting_ns: the part of `collectives_ns` in which another rank had not begun the operation.
    """

    compute_ns: int
    collectives_ns: int
    waiting_ns: int


@dataclass(frozen=True)
class History:
    """The cells and operations of ranks over time, as the timeline draws them.

    Attributes:
        ranks: ranks whose records are included.
        cells: oldest first.
        operations: rank -> its collectives and messages, in the order of their start.
        notes: sentences on missing data, with the reasons.
        clocks: rank -> the offset of its host's clock, on many hosts; times are on one clock.
        busy: rank -> intervals in which its GPU computed, in nanoseconds; only of profiled ranks.
    """

    ranks: tuple[int, ...] = ()
    cells: tuple[TimelineCell, ...] = ()
    operations: Mapping[int, Sequence[Operation]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    clocks: Mapping[int, ClockOffset] = field(default_factory=dict)
    busy: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def length_ns(self) -> int:
        """The time from the start of the first cell to the end of the last, as drawn."""
        return max((cell.end_ns - cell.shift_ns for cell in self.cells), default=0)

    @cached_property
    def _by_cell(self) -> dict[tuple[int, int], list[Operation]]:
        found: dict[tuple[int, int], list[Operation]] = {}
        for rank, ours in self.operations.items():
            for one in ours:
                found.setdefault((rank, one.run), []).append(one)
        return found

    def computing(self, rank: int, cell: TimelineCell) -> Sequence[tuple[int, int]]:
        """Return the intervals (begin, end) in which a rank was in a cell without waiting for an
        operation; for a rank whose GPU was profiled, those in which the GPU computed.
        """
        if rank not in cell.by_rank or rank in self.busy:
            return self.busy.get(rank, ())
        ours = self._by_cell.get((rank, cell.run), ())
        waits = [(one.wait_ns, one.end_ns) for one in ours if one.wait_ns is not None]
        return cut_out([cell.by_rank[rank]], waits)

    def times(self, rank: int, cell: TimelineCell) -> Times:
        """Return a rank's time in a cell by activity."""
        begin, end = cell.by_rank.get(rank, (0, 0))
        ours = self._by_cell.get((rank, cell.run), ())
        return Times(
            sum(end - begin for begin, end in self.computing(rank, cell)),
            in_operations(((one.start_ns, one.end_ns) for one in ours), begin, end),
            in_operations(
                ((one.start_ns, one.start_ns + one.waited_ns) for one in ours), begin, end
            ),
        )

    def lateness(self, cell: TimelineCell | None = None) -> dict[int, Lateness]:
        """Return how late ranks began collectives; messages do not count, because one side always
        waits.

        Args:
            cell: the cell whose collectives count; None for all cells.
        """
        return lateness_of(
            {
                rank: [one for one in ours if cell is None or one.run == cell.run]
                for rank, ours in self.operations.items()
            }
        )

    def took_s(self, *cells: TimelineCell) -> float:
        """Return the total time that these cells took, in seconds; that of all cells of the history
        if none is given.
        """
        return sum(cell.end_ns - cell.begin_ns for cell in cells or self.cells) / 1e9

    @property
    def straggler(self) -> int | None:
        """The rank that began collectives noticeably later than the others, if any."""
        return find_straggler(self.lateness(), self.took_s())

    def describe(self) -> str:
        """Describe the rank that began collectives noticeably late; "" without one."""
        return describe_lateness(self.lateness(), self.took_s())

    def __repr__(self) -> str:
        titles = ", ".join(cell.title for cell in self.cells) or "no cell"
        return f"<timeline of {titles} on {len(self.ranks)} ranks>"


def merge(
    pasts: Mapping[int, Past],
    refusals: Mapping[int, Refusal],
    num_cells: int,
    clocks: Mapping[int, ClockOffset] = NO_CLOCKS,
    busy: Busy = _NEVER_BUSY,
) -> History:
    """Join the ranks' records of their last cells into one history.

    Args:
        pasts: rank -> its record.
        refusals: rank -> the reason for which its record is missing.
        num_cells: number of last cells to include.
        clocks: rank -> the offset of its host's clock; none on one host.
        busy: see `Busy`.
    """
    ahead_s = {rank: clocks[rank].offset_s if rank in clocks else 0.0 for rank in pasts}
    found: dict[int, dict[int, CellSpan]] = {}
    for rank, past in sorted(pasts.items()):
        for span in past.cells:
            found.setdefault(span.run, {})[rank] = span
    chosen = {run: found[run] for run in sorted(found)[-num_cells:]}
    begins = (s.begin_s - ahead_s[rank] for spans in chosen.values() for rank, s in spans.items())
    origin_s = min(begins, default=0.0)

    def at(rank: int, at_s: float) -> int:
        """Convert a time of a rank's clock to nanoseconds from the start of the first cell."""
        return round((at_s - ahead_s[rank] - origin_s) * 1e9)

    def of_rank(rank: int, span: CellSpan) -> tuple[int, int]:
        end_s = pasts[rank].now_s if span.end_s is None else span.end_s
        return at(rank, span.begin_s), at(rank, end_s)

    cells = _close_gaps(
        TimelineCell(
            run,
            _title(next(reversed(spans.values()))),
            {rank: of_rank(rank, span) for rank, span in spans.items()},
            frozenset(rank for rank, span in spans.items() if span.end_s is None),
        )
        for run, spans in chosen.items()
    )
    runs = {cell.run: cell for cell in cells}
    operations = {
        rank: _read(past, rank, runs, partial(at, rank)) for rank, past in sorted(pasts.items())
    }
    return History(
        tuple(sorted(pasts)),
        cells,
        with_waits(operations),
        (
            *_notes(pasts, refusals, cells),
            *filter(None, [describe_clocks(clocks.values())]),
        ),
        clocks,
        {rank: [(at(rank, b), at(rank, e)) for b, e in spans] for rank, spans in busy.items()},
    )


def _title(span: CellSpan) -> str:
    if span.execution_count:
        return f"In[{span.execution_count}]"
    return f"{span.name}()" if span.name else "a cell"


def _close_gaps(cells: Iterable[TimelineCell]) -> tuple[TimelineCell, ...]:
    """Shorten the pauses between cells to a bounded length."""
    ordered = sorted(cells, key=lambda cell: cell.begin_ns)
    longest = round(_GAP * sum(cell.end_ns - cell.begin_ns for cell in ordered))
    shift, reached, closed = 0, 0, []
    for cell in ordered:
        shift += max(0, cell.begin_ns - reached - longest)
        closed.append(replace(cell, shift_ns=shift))
        reached = max(reached, cell.end_ns)
    return tuple(closed)


def _read(
    past: Past, rank: int, cells: Mapping[int, TimelineCell], at: Callable[[float], int]
) -> list[Operation]:
    """Decode a rank's operations from its record, in the order of their start.

    Args:
        past: the rank's record.
        rank: the rank.
        cells: run -> cell; operations of other runs are left out.
        at: converts a time of the rank's clock to nanoseconds from the start of the first cell.
    """
    found = []
    rows = RECORD.iter_unpack(past.numbers)
    for which, (sequence, peer, run, *times) in zip(past.what, rows, strict=True):
        if run not in cells or rank not in cells[run].by_rank:
            continue
        what = past.whats[which]
        start_ns, end_ns, wait_ns = (None if math.isnan(each) else at(each) for each in times)
        assert start_ns is not None
        found.append(
            Operation(
                what.name,
                what.group,
                what.members,
                start_ns,
                # An operation without a recorded end ends with its cell.
                max(0, (cells[run].by_rank[rank][1] if end_ns is None else end_ns) - start_ns),
                run,
                sequence,
                peer,
                what.generation,
                wait_ns,
                end_ns is None and rank in cells[run].running,
                what.is_launch,
            )
        )
    return sorted(found, key=lambda one: one.start_ns)


def _notes(
    pasts: Mapping[int, Past],
    refusals: Mapping[int, Refusal],
    cells: Sequence[TimelineCell],
) -> Iterable[str]:
    gone = "; what it did is gone with it"
    why = {r: f"{each.text}{gone * (each.type_name == 'RankDied')}" for r, each in refusals.items()}
    yield from (f"nothing of {line}" for line in describe_groups(why))
    if not cells:
        yield "no cell has run on the ranks yet"
        return
    if num_left_out := sum(past.num_left_out for past in pasts.values()):
        yield (
            f"{num_left_out:,} older operations of these cells are "
            "not shown: ranks keep their last ones"
        )
    if any(what.is_launch for past in pasts.values() for what in past.whats):
        yield (
            "collectives on GPUs are shown where they were launched; "
            "%%dist_profile shows when they ran"
        )
