"""A rank's record of its last cells and of the collectives in them, the profile of a cell, and
intervals of time.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from .verb import FeatureRequest

# A recorded operation: sequence, peer, run, and begin, end and wait in seconds.
RECORD = struct.Struct("=qqqddd")
# Nanoseconds, or seconds.
_Time = TypeVar("_Time", int, float)


def covered(intervals: Iterable[tuple[_Time, _Time]]) -> _Time:
    """Return the total time that intervals cover; overlaps count once."""
    total: _Time = 0
    for begin, end in join(intervals):
        total += end - begin
    return total


def in_operations(operations: Iterable[tuple[_Time, _Time]], begin: _Time, end: _Time) -> _Time:
    """Return for how long of a cell operations were under way that the cell began: an operation
    without an end (NaN) goes on, and after the cell none of its time is the cell's.

    The one rule for ``--time`` and the timeline. Of DDP's operations the end is noted by the thread
    that runs them, which may be after the cell that began them.

    Args:
        operations: begin and end of each.
        begin, end: of the cell.
    """
    return covered(
        (max(begin, since), end if until != until else min(end, until))
        for since, until in operations
    )


def join(intervals: Iterable[tuple[_Time, _Time]], max_gap: _Time = 0) -> list[tuple[_Time, _Time]]:
    """Sort intervals, and join those that overlap or lie no further apart than `max_gap`."""
    joined: list[tuple[_Time, _Time]] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin - joined[-1][1] <= max_gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def cut_out(
    intervals: Iterable[tuple[_Time, _Time]], holes: Iterable[tuple[_Time, _Time]]
) -> list[tuple[_Time, _Time]]:
    """Return intervals, in order, without the parts that other intervals cover."""
    left = []
    removed = join(holes)
    first = 0
    for begin, end in join(intervals):
        while first < len(removed) and removed[first][1] <= begin:
            first += 1
        at = first
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > begin:
                left.append((begin, removed[at][0]))
            begin = removed[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


OperatorKind = Literal["computation", "communication", "device"]


class BeginProfile(FeatureRequest, frozen=True):
    """Ask a rank to profile its next cell, from the cell's begin to its end."""


class EndProfile(FeatureRequest, frozen=True):
    """Ask a rank for the profile that was recorded of its last cell (`RankProfile`; None if none).

    With a `trace_path`, the trace in Chrome's format is sent too, if it is at most
    `max_trace_bytes` long; a longer one stays in that file on the rank's host.
    """

    trace_path: str
    max_trace_bytes: int


AnyRequest = BeginProfile | EndProfile


class OperatorTime(msgspec.Struct, frozen=True):
    """The total time of all calls of one operator in a profiled cell on a rank.

    Attributes:
        name: as torch's profiler has it.
        kind: computation on the CPU; communication (collectives and messages, the operators that
            launch them, and NCCL's kernels); or another kernel or copy on the rank's GPU.
        num_calls: how many.
        self_ns: time in it, and not in operators that it called. Of a collective: from its begin to
            its end, waiting for other ranks included.
    """

    name: str
    kind: OperatorKind
    num_calls: int
    self_ns: int


@dataclass(frozen=True)
class CellSpan:
    """When a cell, or a call from Python, ran on one rank.

    Attributes:
        run: its run: the same number on all ranks.
        name: of a call, its function; "" for a cell.
        execution_count: ``In[n]``; 0 for a call.
        begin_s, end_s: by the host's monotonic clock; without an end it goes on.
    """

    run: int
    name: str
    execution_count: int
    begin_s: float
    end_s: float | None


@dataclass(frozen=True)
class What:
    """The fields (kind, group, ...) that all operations of one kind on one process group share.

    Attributes:
        name: as ``torch.distributed`` calls it.
        group: torch's name of the group.
        members: its global ranks; () for all.
        generation: of the groups; in each, counts begin with 1.
        is_launch: it runs on a GPU, and what is known is when it was launched.
    """

    name: str
    group: str
    members: tuple[int, ...]
    generation: int
    is_launch: bool = False


@dataclass(frozen=True)
class Past:
    """The last cells of one rank and the operations in them: the answer to `inspect.HistoryQuery`.

    Operations are collectives and messages, oldest first. The numbers of one are: of a collective,
    how many its group had begun with it, of a message, how many went that way between the two ranks
    (0 where that is not known); of a message, the other rank, else -1; the run of the cell that
    began it, -1 for none; begin and end by the host's monotonic clock (NaN while it runs); and
    since when the rank's main thread waited for it, as far as that is known (NaN if it has not).

    Attributes:
        cells: oldest first.
        whats: kinds of operations.
        what: of each operation in these cells, which of `whats` it is.
        numbers: of each, a `RECORD`.
        num_left_out: how many older operations of these cells were left out or lost.
        since_s: when the rank began, by the host's monotonic clock.
        now_s: that clock at the answer.
    """

    cells: tuple[CellSpan, ...]
    whats: tuple[What, ...]
    what: array[int]
    numbers: bytes
    num_left_out: int
    since_s: float
    now_s: float


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.profiler recorded of a cell on one rank.

    Attributes:
        past: the cell and its operations; those on a GPU are where NCCL's kernels ran.
        epoch_ns: what the system clock of the rank's host was ahead of its monotonic one.
        operators: what took longest, of each kind, longest first.
        busy: when its GPU computed, by the monotonic clock in seconds: (begin, end), apart from one
            another; None without a GPU.
        trace: the trace in Chrome's format, if it was wanted and is not too long.
        num_trace_bytes: how long it is.
        trace_path: the file on the rank's host that has it, if it is too long.
        problem: why the cell was not profiled, or its trace not written.
    """

    past: Past
    epoch_ns: int = 0
    operators: tuple[OperatorTime, ...] = ()
    busy: tuple[tuple[float, float], ...] | None = None
    trace: bytes = b""
    num_trace_bytes: int = 0
    trace_path: str = ""
    problem: str = ""
