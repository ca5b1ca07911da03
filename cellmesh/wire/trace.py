"""Messages with a rank's last cells, their collectives and a cell's profile; time intervals."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import ClassVar, Literal, TypeVar

import msgspec

from .verbs import FeatureRequest

# A recorded operation: sequence, peer, run, and begin, end and wait in seconds.
RECORD = struct.Struct("=qqqddd")
# A longer trace of one rank is not sent, and stays where the rank has written it.
MAX_TRACE_BYTES = 64 << 20
# Time in nanoseconds (int), or in seconds (float).
_Time = TypeVar("_Time", int, float)


def in_operations(operations: Iterable[tuple[_Time, _Time]], begin: _Time, end: _Time) -> _Time:
    """Return the time of a cell during which its operations were in flight; an operation without an
    end (NaN) lasts until the end of the cell.

    Used for ``--time`` and for the timeline. DDP's operations may end after the cell that began
    them, as another thread runs them and notes their end.

    Args:
        operations: begin and end of each operation that the cell began.
        begin, end: begin and end of the cell.
    """
    inside = (
        (max(begin, since), end if until != until else min(end, until))
        for since, until in operations
    )
    return sum(last - first for first, last in join(inside))


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


class _Request(FeatureRequest, frozen=True):
    handler: ClassVar[str] = "trace.torch_profiler"


class BeginProfile(_Request, frozen=True):
    """Ask a rank to profile its next cell, from the cell's begin to its end."""


class EndProfile(_Request, frozen=True):
    """Ask a rank for the profile of its last cell (`RankProfile`; None if none was recorded).

    With a `trace_path`, the trace in Chrome's format is sent too, unless it is longer than
    `MAX_TRACE_BYTES`; a longer one stays in that file on the rank's host.
    """

    trace_path: str


AnyRequest = BeginProfile | EndProfile


class OperatorTime(msgspec.Struct, frozen=True):
    """The total time of all calls of one operator in a profiled cell on a rank.

    Attributes:
        name: name of the operator in torch's profiler.
        kind: computation on the CPU; communication (collectives and messages, the operators that
            launch them, and NCCL's kernels); or another kernel or copy on the rank's GPU.
        num_calls: number of calls.
        self_ns: time in the operator without the operators that it called, in nanoseconds; for a
            collective, from its begin to its end, including the wait for other ranks.
    """

    name: str
    kind: OperatorKind
    num_calls: int
    self_ns: int


class CellSpan(msgspec.Struct, frozen=True):
    """The time during which a cell, or a call from Python, ran on one rank.

    Attributes:
        run: number of the run, the same on all ranks.
        name: name of a call's function; "" for a cell.
        execution_count: n of the cell ``In[n]``; 0 for a call.
        begin_s, end_s: begin and end, in seconds of the host's monotonic clock; without an end it
            still runs.
    """

    run: int
    name: str
    execution_count: int
    begin_s: float
    end_s: float | None


class What(msgspec.Struct, frozen=True):
    """The fields (kind, group, ...) that all operations of one kind on one process group share.

    Attributes:
        name: name of the function in ``torch.distributed``.
        group: torch's name of the process group.
        members: global ranks of the group's members; () for all.
        generation: generation of the groups (made or healed); in each, numbers begin with 1.
        is_launch: whether it runs on a GPU and only the time of its launch is known.
    """

    name: str
    group: str
    members: tuple[int, ...]
    generation: int
    is_launch: bool = False


class Past(msgspec.Struct, frozen=True):
    """The last cells of one rank and the operations in them: the answer to `inspect.HistoryQuery`.

    Operations are collectives and messages, oldest first. A `RECORD` of an operation has: its
    number among the group's collectives, or among the messages in that direction between the two
    ranks (0 if unknown); the other rank of a message, else -1; the run of the cell that began it,
    -1 for none; begin and end by the host's monotonic clock (NaN while it runs); and the time since
    when the rank's main thread waited for it, as far as known (NaN if it did not wait).

    Attributes:
        cells: the cells, oldest first.
        whats: kinds of operations.
        what: for each operation in these cells, the index of its kind in `whats`.
        numbers: the operations, a `RECORD` each.
        num_left_out: number of older operations of these cells that were left out or lost.
        now_s: time of the answer, by the host's monotonic clock.
    """

    cells: tuple[CellSpan, ...]
    whats: tuple[What, ...]
    what: array[int]
    numbers: bytes
    num_left_out: int
    now_s: float


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The profile that torch.profiler recorded of a cell on one rank.

    Attributes:
        past: the cell and its operations; operations on a GPU have the times of NCCL's kernels.
        epoch_ns: system clock minus monotonic clock of the rank's host, in nanoseconds.
        operators: operators that took longest, for each kind, longest first.
        busy: intervals (begin, end), without overlaps, in which its GPU computed, by the monotonic
            clock in seconds; None without a GPU.
        trace: trace in Chrome's format, if it was requested and is not too long.
        num_trace_bytes: size of the trace, in bytes.
        trace_path: file on the rank's host with the trace, if it is too long.
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
