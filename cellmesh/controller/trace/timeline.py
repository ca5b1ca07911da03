"""Asks ranks what they did lately, and writes it as a trace in Chrome's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import HostError, MeshUsageError
from ...wire.inspect import History as HistorySubject
from ..inspect.query import ANSWER_S, look
from .chrome import about
from .match import Cell, History, Operation
from .model import merge
from .profile import check_target

if TYPE_CHECKING:
    from ..rank_set import RankSet

# Of all ranks together; of one rank at least so many.
_MAX_OPERATIONS, _MIN_OPERATIONS = 30_000, 300
# Threads of a rank's process in a trace; collectives that overlap have more of the last.
_CELLS, _COMPUTE, _COLLECTIVES = 0, 1, 2


def remember(ranks: RankSet, num_cells: int, trace: str | Path | None = None) -> History:
    """What ranks did in the last cells (see `Ranks.timeline`)."""
    ranks.session._check_usable(())
    if num_cells < 1:
        raise MeshUsageError(f"num_cells must be at least 1, not {num_cells}")
    path = None if trace is None else check_target(Path(trace))
    max_operations = max(_MIN_OPERATIONS, _MAX_OPERATIONS // len(ranks))
    subject = HistorySubject(num_cells, max_operations)
    looked = look(ranks, subject, is_beside=True, timeout_s=ANSWER_S)
    history = merge(looked.answers, looked.refusals, num_cells)
    if path is not None:
        try:
            path.write_bytes(trace_of(history))
        except OSError as error:
            raise HostError(f"the trace could not be written: {error}") from error
    return history


def trace_of(history: History) -> bytes:
    """A trace in which each rank is a process; times count from the first cell's begin.

    Returns:
        JSON for ``chrome://tracing`` or Perfetto.
    """
    titles = {cell.run: cell.title for cell in history.cells}
    events: list[dict[str, Any]] = []
    for rank in history.ranks:
        operations = history.operations.get(rank, ())
        lanes = lanes_of(operations)
        events += _header(rank, max(lanes, default=0) + 1)
        for cell in history.cells:
            events += _of_cell(history, rank, cell)
        for one, lane in zip(operations, lanes, strict=True):
            events += _of_operation(rank, _COLLECTIVES + lane, one, titles[one.run])
    return msgspec.json.encode({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events})


def lanes_of(operations: Iterable[Operation]) -> list[int]:
    """A lane for each operation, so that those of one lane do not overlap."""
    ends: list[int] = []
    lanes = []
    for one in operations:
        lane = next((lane for lane, end in enumerate(ends) if end <= one.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = one.end_ns
        lanes.append(lane)
    return lanes


def _header(rank: int, num_lanes: int) -> list[dict[str, Any]]:
    names = ["cells", "compute", "collectives", *["collectives, overlapping"] * (num_lanes - 1)]
    return [
        about(rank, 0, "process_name", name=f"rank {rank}"),
        about(rank, 0, "process_sort_index", sort_index=rank),
        *(about(rank, thread, "thread_name", name=name) for thread, name in enumerate(names)),
        *(
            about(rank, thread, "thread_sort_index", sort_index=thread)
            for thread in range(len(names))
        ),
    ]


def _of_cell(history: History, rank: int, cell: Cell) -> Iterable[dict[str, Any]]:
    if rank not in cell.by_rank:
        return
    yield _event(rank, _CELLS, cell.title, "cell", *cell.by_rank[rank])
    for begin, end in history.computing(rank, cell):
        yield _event(rank, _COMPUTE, "compute", "compute", begin, end, cell=cell.title)


def _of_operation(rank: int, thread: int, one: Operation, cell: str) -> Iterable[dict[str, Any]]:
    ranks: Sequence[int] | str = list(one.members) or "all"
    yield _event(
        rank,
        thread,
        one.name,
        "message" if one.is_message else "collective",
        one.start_ns,
        one.end_ns,
        cell=cell,
        group=one.group,
        ranks=ranks,
        waited_us=one.waited_ns / 1000,
    )
    if one.waited_ns:
        end_ns = one.start_ns + one.waited_ns
        yield _event(rank, thread, f"waits for rank {one.last}", "wait", one.start_ns, end_ns)


def _event(
    rank: int, thread: int, name: str, category: str, begin_ns: int, end_ns: int, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": thread,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "args": args,
    }
