"""Requests for the profile of a cell, and their answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from .verb import FeatureRequest

OperatorKind = Literal["computation", "communication", "device"]


class BeginProfile(FeatureRequest, frozen=True):
    """Ask a rank to profile the next cell, from its begin to its end."""


class EndProfile(FeatureRequest, frozen=True):
    """Ask for the profile of the last cell (`RankProfile`; None if there is none).

    With a `trace_path`, the trace in Chrome's format is sent too, if it is at most
    `max_trace_bytes` long; a longer one stays in that file on the rank's host.
    """

    trace_path: str
    max_trace_bytes: int


AnyRequest = BeginProfile | EndProfile


class OperatorTime(msgspec.Struct, frozen=True):
    """The total time of all calls of one operator on a rank.

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


class Collective(msgspec.Struct, frozen=True):
    """One collective or message.

    Attributes:
        name: as ``torch.distributed`` calls it.
        start_ns: when it began, in nanoseconds since 1970.
        duration_ns: until it had ended.
        ranks: the members of its process group; () for all ranks, or where that is not known.
        group: torch's name of the group; "" where that is not known.
    """

    name: str
    start_ns: int
    duration_ns: int
    ranks: tuple[int, ...] = ()
    group: str = ""


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of a profiled cell.

    Attributes:
        start_ns, end_ns: when the cell ran on it, in nanoseconds since 1970.
        operators: what took longest, of each kind, longest first.
        collectives: in the order of their begins; the first ones, if there were very many.
        num_collectives: how many there were.
        busy: when it computed, on the CPU or its GPU: (start, duration), apart from one another.
        num_events: what the profiler has recorded.
        trace: the trace in Chrome's format, if it was wanted and is not too long.
        num_trace_bytes: how long it is.
        trace_path: the file on the rank's host that has it, if it is too long.
        problem: why the cell was not profiled, or its trace not written.
    """

    start_ns: int
    end_ns: int
    operators: tuple[OperatorTime, ...] = ()
    collectives: tuple[Collective, ...] = ()
    num_collectives: int = 0
    busy: tuple[tuple[int, int], ...] = ()
    num_events: int = 0
    trace: bytes = b""
    num_trace_bytes: int = 0
    trace_path: str = ""
    problem: str = ""
