"""Profiles a cell with torch.profiler, and summarizes the events.

This module is imported only when a cell is profiled.
"""

from __future__ import annotations

import math
import os
import re
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from ...wire.codec import Frame
from ...wire.inspect import HistoryQuery
from ...wire.trace import (
    MAX_TRACE_BYTES,
    RECORD,
    AnyRequest,
    BeginProfile,
    OperatorKind,
    OperatorTime,
    Past,
    RankProfile,
    What,
    join,
)

if TYPE_CHECKING:
    from ..rank.features import RankContext
    from .recorder import Spans

_MAX_OPERATORS = 100  # for each kind
_MAX_OPERATIONS = 5_000
_MAX_BUSY = 2_000
_LAUNCHES = ("c10d::", "_c10d_functional", "c10d_functional::", "record_param_comms")
_IN_FLIGHT = re.compile(r"^(?:gloo|nccl|mpi|ucc|xccl):(\w+)$")
_KERNEL = re.compile(r"^nccl(?:Dev)?Kernel_([A-Za-z]+)")
# A collective has several names, which differ in the way that tensors are passed.
_VARIANTS = re.compile(r"(_into_tensor|_tensor|_base|_single|_coalesced|sparse_|^_)")
# NCCL has one kernel for several collectives.
_KERNELS = {
    **dict.fromkeys(("send", "recv", "all_to_all"), "send_recv"),
    "barrier": "all_reduce",
}


def read_epoch_ns() -> int:
    """Return the offset of the system clock from the monotonic clock, in nanoseconds."""
    read = []
    for _ in range(5):  # a pause of the process between two readings spoils a sample
        before = time.monotonic_ns()
        system = time.time_ns()
        after = time.monotonic_ns()
        read.append((after - before, system - (before + after) // 2))
    return min(read)[1]


@dataclass(frozen=True)
class Event:
    """One event that torch.profiler has recorded: an operator, a region, or a GPU kernel.

    Attributes:
        name: name in the profiler.
        start_ns, end_ns: nanoseconds since 1970.
        thread: number of the thread.
        is_async: whether it may begin and end on different threads, so that it is in no stack.
        is_annotation: whether it is a named region (``record_function``), not an operator.
        on_device: whether it is a kernel or a copy on a GPU.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int = 1
    is_async: bool = False
    is_annotation: bool = False
    on_device: bool = False


class CellProfiler:
    """Profiles one cell of a rank with torch.profiler.

    Args:
        recorder: recorder of the rank's collectives.
        device: device of the rank.
    """

    def __init__(self, recorder: Spans, device: torch.device) -> None:
        self._recorder = recorder
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: Any = None
        self._has_begun = self._is_running = False
        self._epoch_ns = 0
        self._problem = ""
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "99"
        )  # else it logs its starts and stops on stderr
        if not torch._C._autograd._profiler_enabled():
            with profile(activities=self._activities):  # a first profile takes time and memory
                pass

    def start(self) -> None:
        """Start torch.profiler when a cell begins; of several cells, only the first is profiled."""
        if self._has_begun:
            return
        self._has_begun = True
        if torch._C._autograd._profiler_enabled():  # torch would end that profile silently
            self._problem = "a torch.profiler of the rank's own is running: stop that first"
            return
        made = profile(activities=self._activities)
        try:
            made.start()
        except RuntimeError as error:
            self._problem = f"torch.profiler did not start: {error}"
            return
        self._profile, self._is_running = made, True

    def stop(self) -> None:
        """End the profile when the cell has ended or failed."""
        if not self._is_running:
            return
        self._is_running, self._epoch_ns = False, read_epoch_ns()
        if not torch._C._autograd._profiler_enabled():
            self._profile = None
            self._problem = "the cell ran a torch.profiler of its own, and there can only be one"
            return
        try:
            self._profile.stop()
        except RuntimeError as error:
            self._problem, self._profile = f"torch.profiler did not stop: {error}", None

    def collect(self, trace_path: str) -> RankProfile | None:
        """Return the profile of the cell; None if no cell has run.

        Args:
            trace_path: file for the trace; "" for no trace. A trace longer than `MAX_TRACE_BYTES`
                stays in the file.
        """
        if not self._has_begun:
            return None
        self.stop()
        past = self._recorder.past(HistoryQuery(1, _MAX_OPERATIONS))
        if self._profile is None:
            return RankProfile(past=past, problem=self._problem)
        events = read_events(self._profile)
        return RankProfile(
            past=at_kernels(past, events, self._epoch_ns),
            epoch_ns=self._epoch_ns,
            operators=add_up(events),
            busy=find_busy(events, self._epoch_ns) if len(self._activities) > 1 else None,
            **self._export(trace_path),
        )

    def _export(self, trace_path: str) -> dict[str, Any]:
        if not trace_path:
            return {}
        path = Path(trace_path)
        try:
            self._profile.export_chrome_trace(trace_path)
            size = path.stat().st_size
            if size > MAX_TRACE_BYTES:
                return {"trace_path": trace_path, "num_trace_bytes": size}
            trace = path.read_bytes()
            path.unlink()
        except (OSError, RuntimeError) as error:
            return {"problem": f"its trace could not be written to {trace_path}: {error}"}
        return {"trace": trace, "num_trace_bytes": size}


def read_events(profiled: Any) -> list[Event]:
    """Return the events of a stopped profiler, by start time."""
    cpu = torch._C._autograd.DeviceType.CPU
    events = [
        Event(
            event.name(),
            event.start_ns(),
            event.end_ns(),
            event.start_thread_id(),
            event.is_async(),
            event.is_user_annotation(),
            event.device_type() != cpu,
        )
        for event in profiled.profiler.kineto_results.events()
        if event.end_ns() >= event.start_ns()
    ]
    return sorted(events, key=lambda event: event.start_ns)


def at_kernels(past: Past, events: Iterable[Event], epoch_ns: int) -> Past:
    """Return a rank's recorded operations, with the times of GPU collectives' launches replaced by
    those of their NCCL kernels.

    Args:
        past: the record.
        events: events of the profiler, by start time.
        epoch_ns: offset of the profiler's clock from the record's, in nanoseconds.
    """
    kernels = [
        (_from_camel_case(match[1]), *_seconds(event.start_ns, event.end_ns, epoch_ns))
        for event in events
        if event.on_device and not event.is_annotation and (match := _KERNEL.match(event.name))
    ]
    known: dict[What, int] = {}
    what, rows = array("i"), []
    for which, row in zip(past.what, RECORD.iter_unpack(past.numbers), strict=True):
        one = past.whats[which]
        fitting = (k for k in kernels if k[1] >= row[3] and _is_kernel_of(one.name, k[0]))
        if one.is_launch and (kernel := next(fitting, None)) is not None:
            kernels.remove(kernel)
            one, row = (
                msgspec.structs.replace(one, is_launch=False),
                (*row[:3], *kernel[1:], math.nan),
            )
        what.append(known.setdefault(one, len(known)))
        rows.append(RECORD.pack(*row))
    return msgspec.structs.replace(past, whats=tuple(known), what=what, numbers=b"".join(rows))


def _is_kernel_of(called: str, kernel: str) -> bool:
    """Return whether a collective may have run in an NCCL kernel of this name; their names differ,
    as ``all_gather_into_tensor`` runs in ``all_gather``.
    """
    called = _VARIANTS.sub("", called)
    return kernel in (called, _KERNELS.get(called))


def _from_camel_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def find_busy(events: Iterable[Event], epoch_ns: int) -> tuple[tuple[float, float], ...]:
    """Return the intervals in which a GPU computed, in seconds on the clock that is `epoch_ns`
    behind the profiler's.
    """
    computed = [
        (event.start_ns, event.end_ns)
        for event in events
        if event.on_device and not event.is_annotation and _kind_of(event) == "device"
    ]
    length_ns = max(computed)[1] - min(computed)[0] if computed else 0
    joined = join(computed, length_ns // _MAX_BUSY)
    return tuple(_seconds(begin, end, epoch_ns) for begin, end in joined)


def _seconds(begin_ns: int, end_ns: int, epoch_ns: int) -> tuple[float, float]:
    return (begin_ns - epoch_ns) / 1e9, (end_ns - epoch_ns) / 1e9


def _kind_of(event: Event) -> OperatorKind:
    if (
        event.name.startswith(_LAUNCHES)
        or _IN_FLIGHT.match(event.name)
        or _KERNEL.match(event.name)
    ):
        return "communication"
    return "device" if event.on_device else "computation"


def add_up(events: Sequence[Event]) -> tuple[OperatorTime, ...]:
    """Return a profile's operators with the longest self time, longest first; a limited number for
    each kind of operator.
    """
    totals: dict[tuple[OperatorKind, str], list[int]] = {}
    for event, self_ns in self_times(events):
        total = totals.setdefault((_kind_of(event), event.name), [0, 0])
        total[0] += 1
        total[1] += self_ns
    longest = sorted(totals.items(), key=lambda item: -item[1][1])
    left = {
        "computation": _MAX_OPERATORS,
        "communication": _MAX_OPERATORS,
        "device": _MAX_OPERATORS,
    }
    chosen = []
    for (kind, name), (num_calls, self_ns) in longest:
        left[kind] -= 1
        if left[kind] >= 0:
            chosen.append(OperatorTime(name, kind, num_calls, self_ns))
    return tuple(chosen)


def self_times(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Return a profile's operators with their self time (without operators that they called).

    Named regions are left out, except for collectives in flight. Events in no thread's stack (GPU,
    collectives in flight) count in full.
    """
    whole: list[tuple[Event, int]] = []
    stacks: dict[int, list[Event]] = {}
    for event in events:
        if event.on_device or event.is_async:
            if not event.is_annotation or (not event.on_device and _IN_FLIGHT.match(event.name)):
                whole.append((event, event.end_ns - event.start_ns))
        elif not event.is_annotation:
            stacks.setdefault(event.thread, []).append(event)
    nested: list[tuple[Event, int]] = []
    for on_thread in stacks.values():
        nested += _unstack(on_thread)
    return whole + nested


def _unstack(on_thread: list[Event]) -> list[tuple[Event, int]]:
    on_thread.sort(key=lambda event: (event.start_ns, -event.end_ns))
    self_ns = [event.end_ns - event.start_ns for event in on_thread]
    open_ones: list[int] = []
    for index, event in enumerate(on_thread):
        while open_ones and on_thread[open_ones[-1]].end_ns <= event.start_ns:
            open_ones.pop()
        if open_ones:
            parent = open_ones[-1]
            self_ns[parent] -= min(event.end_ns, on_thread[parent].end_ns) - event.start_ns
        open_ones.append(index)
    return list(zip(on_thread, self_ns, strict=True))


class ProfileHandler:
    """Starts and ends profiles of cells on one rank.

    Args:
        context: context of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._profiler: CellProfiler | None = None

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> RankProfile | None:
        """Start or end a profile, on the main thread; see `rank.features.Handler`."""
        profiler, self._profiler = self._profiler, None
        if isinstance(request, BeginProfile):
            self._profiler = CellProfiler(self._context.groups.ledger.spans, self._context.device)
        self._context.observer = self._profiler
        if profiler is None or isinstance(request, BeginProfile):
            return None
        return profiler.collect(request.trace_path)

    def handle_beside(self, request: AnyRequest) -> Any:
        """Raise NotImplementedError: profiles start and end on the main thread only."""
        raise NotImplementedError(request)


make_handler = ProfileHandler
