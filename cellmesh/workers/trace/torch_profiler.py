"""Profiles a cell with torch.profiler and summarises the events.

Imported when a cell is profiled, and not before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...wire.codec import Frame
from ...wire.trace import (
    AnyRequest,
    BeginProfile,
    Collective,
    OperatorKind,
    OperatorTime,
    RankProfile,
    cut_out,
    join,
    read_epoch_ns,
)

if TYPE_CHECKING:
    from ..rank.features import RankContext
    from .recorder import Spans

_MAX_OPERATORS = 100  # of each kind
_MAX_COLLECTIVES = 5_000
_MAX_BUSY = 2_000
_LAUNCHES = ("c10d::", "_c10d_functional", "c10d_functional::", "record_param_comms")
_IN_FLIGHT = re.compile(r"^(?:gloo|nccl|mpi|ucc|xccl):(\w+)$")
_KERNEL = re.compile(r"^nccl(?:Dev)?Kernel_([A-Za-z]+)")
# A collective goes by several names that differ in how tensors are passed.
_VARIANTS = re.compile(r"(_into_tensor|_tensor|_base|_single|_coalesced|sparse_|^_)")


@dataclass(frozen=True)
class Event:
    """One event that torch.profiler recorded: an operator, a region or a GPU's kernel.

    Attributes:
        name: as the profiler has it.
        start_ns, end_ns: nanoseconds since 1970.
        thread: where it ran.
        is_async: it may begin and end on different threads, so it is in no stack.
        is_annotation: a region that was named (``record_function``), and no operator.
        on_device: a kernel or a copy on a GPU.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int = 1
    is_async: bool = False
    is_annotation: bool = False
    on_device: bool = False


@dataclass(frozen=True)
class Begun:
    """A collective that was begun on a process group during the profile: its name, time, group and
    ranks.
    """

    name: str
    at_ns: int
    group: str
    ranks: tuple[int, ...]


class CellProfiler:
    """Profiles one cell of a rank with torch.profiler.

    Args:
        recorder: of the rank's collectives.
        device: where the rank computes.
    """

    def __init__(self, recorder: Spans, device: torch.device) -> None:
        self._recorder = recorder
        self._first = 0
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: Any = None
        self._start_ns = self._end_ns = self._epoch_ns = 0
        self._is_running = False
        self._problem = ""
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "99"
        )  # else it says on stderr that it starts and stops
        if not torch._C._autograd._profiler_enabled():
            with profile(activities=self._activities):  # the first one takes its time, and memory
                pass

    def start(self) -> None:
        """Begin the profile, as a cell begins; only the first cell is profiled."""
        if self._start_ns:
            return
        self._start_ns = time.time_ns()
        if torch._C._autograd._profiler_enabled():  # torch would end that one, without a word
            self._problem = "a torch.profiler of the rank's own is running: stop that first"
            return
        made = profile(activities=self._activities)
        try:
            made.start()
        except RuntimeError as error:
            self._problem = f"torch.profiler did not start: {error}"
            return
        self._profile, self._is_running = made, True
        self._first = self._recorder.num_begun
        self._start_ns = time.time_ns()

    def stop(self) -> None:
        """End the profile, as the cell has ended, well or not."""
        if not self._end_ns:
            self._end_ns = time.time_ns()
            self._epoch_ns = read_epoch_ns()
        if not self._is_running:
            return
        if not torch._C._autograd._profiler_enabled():
            self._is_running, self._profile = False, None
            self._problem = "the cell ran a torch.profiler of its own, and there can only be one"
            return
        try:
            self._profile.stop()
        except RuntimeError as error:
            self._problem, self._profile = f"torch.profiler did not stop: {error}", None
        self._is_running = False

    def collect(self, trace_path: str, max_trace_bytes: int) -> RankProfile | None:
        """Return the profile of the cell; None if no cell has run.

        Args:
            trace_path: where the trace is written; "" for nowhere.
            max_trace_bytes: a trace that is longer stays there, others come along.
        """
        if not self._start_ns:
            return None
        self.stop()
        if self._profile is None:
            return RankProfile(
                start_ns=self._start_ns,
                end_ns=self._end_ns,
                epoch_ns=self._epoch_ns,
                problem=self._problem,
            )
        events = read_events(self._profile)
        collectives = find_collectives(events, self._begun())
        resolution_ns = (self._end_ns - self._start_ns) // _MAX_BUSY
        return RankProfile(
            start_ns=self._start_ns,
            end_ns=self._end_ns,
            epoch_ns=self._epoch_ns,
            operators=add_up(events),
            collectives=tuple(collectives[:_MAX_COLLECTIVES]),
            num_collectives=len(collectives),
            busy=find_busy(events, resolution_ns),
            num_events=len(events),
            **self._export(trace_path, max_trace_bytes),
        )

    def _begun(self) -> list[Begun]:
        return [
            Begun(what.name, self._epoch_ns + round(begin_s * 1e9), what.group, what.members)
            for what, begin_s, _ in self._recorder.begun_since(self._first)
        ]

    def _export(self, trace_path: str, max_trace_bytes: int) -> dict[str, Any]:
        if not trace_path:
            return {}
        path = Path(trace_path)
        try:
            self._profile.export_chrome_trace(trace_path)
            size = path.stat().st_size
            if size > max_trace_bytes:
                return {"trace_path": trace_path, "num_trace_bytes": size}
            trace = path.read_bytes()
            path.unlink()
        except (OSError, RuntimeError) as error:
            return {"problem": f"its trace could not be written to {trace_path}: {error}"}
        return {"trace": trace, "num_trace_bytes": size}


def read_events(profiled: Any) -> list[Event]:
    """Return the events of a stopped profiler, in the order of their begins."""
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


def find_collectives(events: Sequence[Event], begun: Sequence[Begun]) -> list[Collective]:
    """Return the collectives and messages among events, with their process groups.

    NCCL's take place on the GPU, and what the CPU has of them is only their launch; gloo's are
    where its threads are. Groups are told by the order of begins, as neither names them.

    Args:
        events: in the order of their begins.
        begun: what was begun on which group, in that order.
    """
    on_device = any(event.on_device and _KERNEL.match(event.name) for event in events)
    spans = [event for event in events if _collective_name(event, on_device)]
    waiting = list(begun)
    found = []
    for span in spans:
        name = _collective_name(span, on_device)
        index = next(
            (
                i
                for i, one in enumerate(waiting)
                if one.at_ns <= span.start_ns and alike(one.name, name)
            ),
            None,
        )
        duration_ns = span.end_ns - span.start_ns
        if index is None:
            found.append(Collective(name, span.start_ns, duration_ns))
        else:
            one = waiting.pop(index)
            found.append(Collective(one.name, span.start_ns, duration_ns, one.ranks, one.group))
    return found


def alike(one: str, other: str) -> bool:
    """Return whether a collective called by one name may appear in a trace under the other.

    ``all_gather_into_tensor`` is ``all_gather`` below; gloo makes a ``reduce_scatter`` of an
    ``all_reduce``.
    """
    called, below = _VARIANTS.sub("", one), _VARIANTS.sub("", other)
    return called == below or (called, below) == ("reduce_scatter", "all_reduce")


def _collective_name(event: Event, on_device: bool) -> str:
    """Return the name of the collective that a profiler's event belongs to; "" if none."""
    if event.on_device:
        kernel = None if event.is_annotation else _KERNEL.match(event.name)
        return _from_camel_case(kernel[1]) if kernel else ""
    in_flight = _IN_FLIGHT.match(event.name)
    if in_flight is None or (on_device and event.name.startswith("nccl:")):
        return ""
    return in_flight[1]


def _from_camel_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def find_busy(events: Sequence[Event], resolution_ns: int) -> tuple[tuple[int, int], ...]:
    """Return when operators and kernels computed, without the collectives that they call.

    Args:
        events: in the order of their begins.
        resolution_ns: gaps up to this are closed.

    Returns:
        (start, duration), in order, apart from one another.
    """
    computed: dict[int, list[tuple[int, int]]] = {}
    communicated: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if not event.is_annotation and not event.is_async:
            into = communicated if _kind_of(event) == "communication" else computed
            into.setdefault(-1 if event.on_device else event.thread, []).append(
                (event.start_ns, event.end_ns)
            )
    found: list[tuple[int, int]] = []
    for thread, intervals in computed.items():
        found += cut_out(intervals, communicated.get(thread, ()) if thread != -1 else ())
    return tuple((begin, end - begin) for begin, end in join(found, resolution_ns))


def _kind_of(event: Event) -> OperatorKind:
    if (
        event.name.startswith(_LAUNCHES)
        or _IN_FLIGHT.match(event.name)
        or _KERNEL.match(event.name)
    ):
        return "communication"
    return "device" if event.on_device else "computation"


def add_up(events: Sequence[Event]) -> tuple[OperatorTime, ...]:
    """Return the operators with the longest self time in a profile, of each kind, longest first."""
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

    Regions that were named are left out, except for collectives under way. What is in no thread's
    stack (GPU, collectives under way) counts whole.
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
    """Begins and ends profiles of cells on one rank.

    Args:
        context: the rank's.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._profiler: CellProfiler | None = None

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> RankProfile | None:
        """Begin or end a profile, on the main thread; see `rank.features.Handler`."""
        profiler, self._profiler = self._profiler, None
        if isinstance(request, BeginProfile):
            self._profiler = CellProfiler(self._context.groups.ledger.spans, self._context.device)
        self._context.observer = self._profiler
        if profiler is None or isinstance(request, BeginProfile):
            return None
        return profiler.collect(request.trace_path, request.max_trace_bytes)

    def handle_beside(self, request: AnyRequest) -> Any:
        """Raise NotImplementedError: profiles begin and end on the main thread only."""
        raise NotImplementedError(request)


make_handler = ProfileHandler
