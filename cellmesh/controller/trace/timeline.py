"""Asks ranks what they did in their last cells, and joins the answers to one history.

What a rank was in the same collective with others shows in the group and in how many that had
begun; who begins such a one early waits for the last. All ranks of a host have one clock; those of
other hosts are compared with it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import HostError, MeshUsageError
from ...wire.inspect import HistoryQuery, Refusal
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.trace import Past
from ..core.clocks import ClockOffset, describe_clocks
from ..inspect import ANSWER_S, look
from .chrome import NO_CLOCKS, trace_of
from .history import History, TimelineCell
from .operations import Operation, match, with_waits
from .profile import check_target

if TYPE_CHECKING:
    from ..rank_set import RankSet

# Time between cells is drawn this long at most, as a part of the time in cells.
_GAP = 0.02
# Of all ranks together; of one rank at least so many.
_MAX_OPERATIONS, _MIN_OPERATIONS = 30_000, 300


def remember(ranks: RankSet, num_cells: int, trace: str | Path | None = None) -> History:
    """Ask ranks for their last cells, and return the joined history (see `Ranks.timeline`)."""
    ranks.session.check_usable(())
    if num_cells < 1:
        raise MeshUsageError(f"num_cells must be at least 1, not {num_cells}")
    path = None if trace is None else check_target(Path(trace))
    max_operations = max(_MIN_OPERATIONS, _MAX_OPERATIONS // len(ranks))
    subject = HistoryQuery(num_cells, max_operations)
    looked = look(ranks, subject, is_beside=True, timeout_s=ANSWER_S)
    clocks = ranks.session.clocks(looked.answers)
    history = merge(looked.answers, looked.refusals, num_cells, clocks)
    if path is not None:
        try:
            path.write_bytes(trace_of(history))
        except OSError as error:
            raise HostError(f"the trace could not be written: {error}") from error
    return history


def past_on_our_clock(past: Past, clock: ClockOffset) -> Past:
    """Return a rank's record with times by the clock of the notebook's host."""
    ahead_s, told = clock.offset_s, past.operations

    def shifted(column: array[float]) -> array[float]:
        return array("d", [at_s - ahead_s for at_s in column])

    return replace(
        past,
        cells=tuple(
            replace(
                cell,
                begin_s=cell.begin_s - ahead_s,
                end_s=None if cell.end_s is None else cell.end_s - ahead_s,
            )
            for cell in past.cells
        ),
        operations=replace(
            told,
            begin_s=shifted(told.begin_s),
            end_s=shifted(told.end_s),
            wait_s=shifted(told.wait_s),
        ),
        since_s=past.since_s - ahead_s,
        now_s=past.now_s - ahead_s,
    )


def merge(
    pasts: Mapping[int, Past],
    refusals: Mapping[int, Refusal],
    num_cells: int,
    clocks: Mapping[int, ClockOffset] = NO_CLOCKS,
) -> History:
    """Join the ranks' records of their last cells to one history.

    Args:
        pasts: rank -> what it told.
        refusals: rank -> why it told nothing.
        num_cells: how many of the last cells are wanted.
        clocks: rank -> the offset of its host's clock; none on one host.
    """
    pasts = {
        rank: past_on_our_clock(past, clocks[rank]) if rank in clocks else past
        for rank, past in pasts.items()
    }
    cells, origin_s = _merge_cells(pasts, num_cells)
    runs = {cell.run: cell for cell in cells}
    operations = {rank: _read(past, rank, runs, origin_s) for rank, past in sorted(pasts.items())}
    late = {rank: _ns(past.since_s - origin_s) for rank, past in pasts.items()}
    cut = {rank for rank, past in pasts.items() if past.num_left_out}
    num_left_out = sum(past.num_left_out for past in pasts.values())
    matches = match(operations, late, cut)
    return History(
        tuple(sorted(pasts)),
        cells,
        with_waits(operations, matches),
        matches,
        (
            *_notes(pasts, refusals, cells, late, num_left_out),
            *filter(None, [describe_clocks(clocks.values())]),
        ),
        clocks,
    )


def _merge_cells(
    pasts: Mapping[int, Past], num_cells: int
) -> tuple[tuple[TimelineCell, ...], float]:
    found: dict[int, dict[int, tuple[float, float | None]]] = {}
    titles: dict[int, str] = {}
    for rank, past in pasts.items():
        for span in past.cells:
            found.setdefault(span.run, {})[rank] = (span.begin_s, span.end_s)
            called = f"{span.name}()" if span.name else "a cell"
            titles[span.run] = f"In[{span.execution_count}]" if span.execution_count else called
    chosen = sorted(found)[-num_cells:]
    origin_s = min((begin for run in chosen for begin, _ in found[run].values()), default=0.0)
    cells = []
    for run in chosen:
        by_rank = {
            rank: (
                _ns(begin - origin_s),
                _ns((pasts[rank].now_s if end is None else end) - origin_s),
            )
            for rank, (begin, end) in sorted(found[run].items())
        }
        running = frozenset(rank for rank, (_, end) in found[run].items() if end is None)
        cells.append(TimelineCell(run, titles[run], by_rank, running))
    return _close_gaps(cells), origin_s


def _close_gaps(cells: Iterable[TimelineCell]) -> tuple[TimelineCell, ...]:
    """Shorten the pauses between cells, in which the ranks had nothing to do."""
    ordered = sorted(cells, key=lambda cell: cell.begin_ns)
    longest = round(_GAP * sum(cell.end_ns - cell.begin_ns for cell in ordered))
    shift, reached, closed = 0, 0, []
    for cell in ordered:
        shift += max(0, cell.begin_ns - reached - longest)
        closed.append(replace(cell, shift_ns=shift))
        reached = max(reached, cell.end_ns)
    return tuple(closed)


def _read(
    past: Past, rank: int, cells: Mapping[int, TimelineCell], origin_s: float
) -> list[Operation]:
    told, found = past.operations, []
    for index, run in enumerate(told.run):
        if run not in cells or rank not in cells[run].by_rank:
            continue
        what, begin_s, end_s, wait_s = (
            told.whats[told.what[index]],
            told.begin_s[index],
            told.end_s[index],
            told.wait_s[index],
        )
        has_ended = not math.isnan(end_s)
        start_ns = _ns(begin_s - origin_s)
        # What was left when its cell ended has no end of its own.
        end_ns = _ns(end_s - origin_s) if has_ended else cells[run].by_rank[rank][1]
        found.append(
            Operation(
                what.name,
                what.group,
                what.members,
                start_ns,
                max(0, end_ns - start_ns),
                run,
                told.sequence[index],
                told.peer[index],
                what.generation,
                None if math.isnan(wait_s) else _ns(wait_s - origin_s),
                not has_ended and rank in cells[run].running,
                what.is_launch,
            )
        )
    return sorted(found, key=lambda one: one.start_ns)


def _notes(
    pasts: Mapping[int, Past],
    refusals: Mapping[int, Refusal],
    cells: Sequence[TimelineCell],
    late: Mapping[int, int],
    num_left_out: int,
) -> Iterable[str]:
    alike = group_ranks({rank: _describe_refusal(refusal) for rank, refusal in refusals.items()})
    for why, ranks in alike.items():
        yield f"nothing of {describe_ranks(ranks)}: {why}"
    if not cells:
        yield "no cell has run on the ranks yet"
        return
    new = [rank for rank in pasts if late[rank] > cells[0].begin_ns]
    if new:
        before = [cell.title for cell in cells if cell.begin_ns < max(late[rank] for rank in new)]
        yield (
            f"{describe_ranks(new)} replaced another after {before[-1]}: what that one did is "
            "gone with it"
        )
    if num_left_out:
        yield (
            f"{num_left_out:,} older operations of these cells are "
            "not shown: ranks keep their last ones"
        )
    launches = any(what.is_launch for past in pasts.values() for what in past.operations.whats)
    if launches:
        yield (
            "collectives on GPUs are shown where they were launched; "
            "%%dist_profile shows when they ran"
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _describe_refusal(refusal: Refusal) -> str:
    gone = "; what it did is gone with it" if refusal.type_name == "RankDied" else ""
    return refusal.text + gone
