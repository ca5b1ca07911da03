"""Records which operations a rank has begun on its process groups, and which have ended.

The methods that `HealableGroup` forwards to its inner group are read off ``ProcessGroup`` as it is
installed: newer versions of torch call names that older ones do not have.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work
from torch._C._dynamo import eval_frame

from ...stdlib import threading, time
from ...wire import groups as wire
from ...wire.groups import GroupCount, InFlight
from ...wire.trace import What
from ..static_lookup import module_of
from ..trace.recorder import Spans
from .abort import Drain
from .any_backend import ForeignWork
from .gate import Gate
from .group_factory import GroupPlan
from .interruptible_wait import Patience, PatientCollective, PatientMessage, PatientReceive
from .signatures import Signed, signer

# What users call the methods of ProcessGroup; a `_coalesced` or unknown one keeps its own name.
_LABELS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
}
# Where DDP's C++ is called from: the engine, on the thread that called ``backward`` or on one of
# its own.
_BACKWARD = ("torch.autograd.graph", "torch.autograd", "")
_RETURNS_WORK = re.compile(r"-> \S*\bWork\b")
# To wait for a message in another thread takes some 50 us longer. Smaller ones are hardly ever on
# their way when a rank dies, and then their wait ends with the group's time-out or the rank.
_LARGE_BYTES = 64 << 10
# Of operations that are waited for later, so many are known at a time.
_MAX_EARLIER = 1024
# How often operations in flight are looked at.
_LOOK_S = 0.002
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
# What only makes sense on the C++ object.
_OF_CPP = frozenset({"rank", "size", "boxed", "unbox", "BackendType"})


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective or point-to-point operation that is in flight on this rank."""

    name: str  # as ``torch.distributed`` calls it
    group: str  # torch's name of its process group
    since: float  # when it was begun, by ``time.monotonic``


# An operation's label, its group, when it was begun, how to reach its Work (None while it is
# called), its number on the group or among the messages with its peer, and that peer.
Begun = tuple[str, "TrackedGroup", float, Callable[[], Work | None] | None, int, int]


@dataclass
class Ledger:
    """The collectives, sends and receives that this process has begun, by group. Every operation
    updates the ledger, so an update must be cheap.
    """

    patience: Patience
    drain: Drain = field(default_factory=Drain)
    spans: Spans = field(default_factory=Spans)
    generation: int = 0  # of the groups; 0 until they are healed
    # Counts the stops and heals after which ranks may go on from different places: the next
    # collective on each group is compared.
    num_doubts: int = 0
    compare_first: Callable[[TrackedGroup, Signed], None] = lambda group, signed: None
    # The groups that have begun collectives since `mark`.
    touched: list[TrackedGroup] = field(default_factory=list)
    last: Begun | None = None  # of the main thread
    before_run: float = 0.0  # when the last one before the current run was begun
    # Those that were under way when others were begun, oldest first: the last one may fail or end
    # while an earlier one is waited for.
    earlier: deque[Begun] = field(default_factory=lambda: deque(maxlen=_MAX_EARLIER))
    is_rebuilding: bool = False
    main_thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)
    gate: Gate = field(init=False)  # where a stop pauses the rank

    def __post_init__(self) -> None:
        self.gate = Gate(self.main_thread)

    def keep(self, begun: Begun) -> None:
        """Keep an operation's record when another begins, if the first is still in flight."""
        if _is_under_way(begun):
            self.drop_ended()
            self.earlier.append(begun)

    def drop_ended(self) -> None:
        """Drop records of the oldest operations that have ended, as a Work holds tensors."""
        earlier = self.earlier
        while earlier and not _is_under_way(earlier[0]):
            earlier.popleft()

    def forget(self, group: TrackedGroup) -> None:
        """Drop all records of operations of a group."""
        self.touched = [other for other in self.touched if other is not group]
        group.is_touched = False
        if self.last is not None and self.last[1] is group:
            self.last = None
        self.earlier = deque((one for one in self.earlier if one[1] is not group), _MAX_EARLIER)

    def mark(self) -> None:
        """Begin what `counts_since_mark` counts from. Main thread."""
        if self.touched:
            for group in self.touched:
                group.is_touched = False
                group.forget_backward()
            self.touched = []
            self.drop_ended()

    def counts_since_mark(self) -> tuple[GroupCount, ...]:
        """Return the numbers of collectives on the groups used since `mark`. Main thread."""
        return tuple([group.count(with_messages=False) for group in self.touched])

    def forget_operations(self) -> None:
        """Drop all records of operations: they have ended or are not waited for any more."""
        self.last = None
        self.earlier.clear()

    def await_operations(self, timeout_s: float) -> None:
        """Wait until the collectives that are in flight have ended, well or not; raise TimeoutError
        after `timeout_s`. Main thread.

        gloo says of messages that they have ended only after a ``wait``. They arrive in tensors
        that nothing else uses.
        """
        deadline = time.monotonic() + timeout_s
        for begun in [*self.earlier, *([self.last] if self.last is not None else [])]:
            while begun[0] not in _POINT_TO_POINT and _is_under_way(begun):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"an {begun[0]} of {begun[1].group_name} did not end")
                time.sleep(_LOOK_S)

    def current(self) -> CollectiveRecord | None:
        """Return the operation begun last, if it is in flight; else the oldest one in flight."""
        last = self.last
        for one in ([last] if last is not None else []) + list(self.earlier):
            if _is_under_way(one):
                label, group, since = one[:3]
                return CollectiveRecord(label, group.group_name, since)
        return None

    def last_begun(self) -> CollectiveRecord | None:
        """Return the operation that this rank has begun last, ended or not."""
        if self.last is None:
            return None
        label, group, since = self.last[:3]
        return CollectiveRecord(label, group.group_name, since)

    def last_collective(self) -> tuple[wire.Begun | None, str]:
        """Return the collective that this rank has begun last, ended or not, and what users call
        its group; None and "" if it has begun a message since.
        """
        if self.last is None or self.last[0] in _POINT_TO_POINT:
            return None, ""
        group, number = self.last[1], self.last[4]
        recent = group.count(with_recent=True).recent
        begun = next((one for one in recent if one.number == number), None)
        return begun, group.label if begun is not None else ""

    def in_flight(self) -> tuple[InFlight, ...]:
        """Return the oldest collective that is in flight on each group, and the oldest message each
        way with each peer. Any thread.
        """
        oldest: dict[tuple[str, str, int], InFlight] = {}
        for one in [*self._earlier(), *([self.last] if self.last is not None else [])]:
            label, group, _, _, number, peer = one
            way = label if label in _POINT_TO_POINT else ""
            key = (group.group_name, way, peer)
            if key not in oldest and _is_under_way(one):
                oldest[key] = InFlight(group.group_name, label, number, peer, group.gives_up_soon)
        return tuple(oldest.values())

    def _earlier(self) -> list[Begun]:
        while True:
            try:
                return list(self.earlier)
            except RuntimeError:  # the main thread has begun one while they were copied
                continue


class TrackedGroup(Protocol):
    """Protocol of a `HealableGroup`, as the ledger and the forwarded methods use it."""

    _ledger: Ledger
    _inner: Any
    _backward_work: Work | None
    _from_anyone: list[Work]
    _num_sent: dict[int, int]
    _num_received: dict[int, int]
    is_touched: bool
    is_gloo: bool
    num_collectives: int
    num_doubts: int
    plan: GroupPlan
    recent: deque[Signed]
    whats: dict[str, What]

    @property
    def group_name(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def gives_up_soon(self) -> bool: ...

    def size(self) -> int: ...

    def global_rank(self, rank: int) -> int: ...

    def count(self, with_messages: bool = True, with_recent: bool = False) -> GroupCount: ...

    def what(self, label: str) -> What: ...

    def forget_backward(self) -> None: ...

    def _settle_from_anyone(self) -> None: ...


def _is_under_way(begun: Begun) -> bool:
    find_work = begun[3]
    if find_work is None:
        return True
    work = find_work()
    try:
        return work is not None and not work.is_completed()
    except Exception:  # an aborted communicator
        return False


def has_ended_well(work: Work) -> bool:
    """Return whether the operation of a Work has succeeded."""
    try:
        return (
            work.is_completed() and work.wait()
        )  # which does not wait then, but raises what it met
    except Exception:
        return False


def _begin(
    group: TrackedGroup,
    label: str,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    sequence: int,
    peer: int = -1,
) -> Any:
    """Call a method of the plain ``ProcessGroup`` under a `HealableGroup`, and record the
    operation as the ledger's last one while it is in flight.
    """
    ledger = group._ledger
    ident = threading.get_ident()
    # The engine's threads, unknown to Python, run backward on behalf of the main thread.
    if ident != ledger.main_thread and ident in threading._active:  # type: ignore[attr-defined]
        return call(*args, **kwargs)
    since = time.monotonic()
    last = ledger.last
    if last is not None and (last[3] is None or last[3]() is not None):
        ledger.keep(last)
    ledger.last = (label, group, since, None, sequence, peer)
    spans, number = ledger.spans, -1
    is_message = label in _POINT_TO_POINT
    # Whether a wait in Python follows at once. Messages do not show it: their wait does.
    is_sync = not getattr(args[-1] if args else kwargs.get("opts"), "asyncOp", True)
    if spans.is_on:
        what = group.whats.get(label) or group.what(label)
        number = spans.begin(what, sequence, peer, since, is_sync)
    try:
        work = call(*args, **kwargs)
    except BaseException:
        ledger.last = None
        spans.end(number)
        raise
    if not isinstance(work, Work):
        ledger.last = None
        spans.end(number)
        return work
    if not group.is_gloo:
        spans.end(number)  # the launch: the GPU does the rest by itself
    caller = module_of(sys._getframe(1).f_back)
    is_of_join = caller == c10d.__name__ and _is_of_join(sys._getframe(1))
    if is_of_join and type(work) is ForeignWork:
        work = work._work
    if caller == c10d.__name__ and not is_of_join:
        if group.is_gloo:
            if is_message:  # it has no future
                is_large = sum(tensor.nbytes for tensor in args[0]) >= _LARGE_BYTES
                work = PatientMessage(work, ledger.patience, spans, number, is_large)
            else:
                if not is_sync:
                    spans.end_with(work, number)
                work = PatientCollective(work, ledger.patience, spans, number, is_sync)
        # Its caller waits for it or gives it to the user: it lives while anyone may wait.
        ledger.last = (label, group, since, weakref.ref(work), sequence, peer)
        return work
    # C++ (DDP, also under Join, functional collectives) keeps it where Python does not see that.
    inner = work
    ledger.last = (label, group, since, lambda: inner, sequence, peer)
    if caller in _BACKWARD:
        group._backward_work = inner
    if group.is_gloo:
        spans.end_with(inner, number)
        if not is_of_join and not is_message:
            work = PatientCollective(inner, ledger.patience, spans, number)
    elif caller not in _BACKWARD:  # most often used at once; what C++ waits for is not seen
        spans.wait(number, since)
    return work


def _is_of_join(method: types.FrameType) -> bool:
    """Return whether torch's ``Join`` began an operation for DDP, which keeps only the C++ Work."""
    function = method.f_back  # dist.all_reduce; round it the wrapper that logs its errors
    wrapper = function and function.f_back
    caller = wrapper and wrapper.f_back
    is_of_join = module_of(caller) == "torch.distributed.algorithms.join"
    return is_of_join and function is not None and bool(function.f_locals.get("async_op"))


def _collective(method: str) -> Callable[..., Any]:
    label = _LABELS.get(method, method)
    sign = signer(method)

    def begin(self: TrackedGroup, *args: Any, **kwargs: Any) -> Any:
        gate = self._ledger.gate
        if gate.is_closed:
            gate.enter(self.size())
        call = getattr(self._inner, method)
        number = self.num_collectives + 1
        signed = (number, label, *sign(args, kwargs))
        if not self.is_touched:
            ledger = self._ledger
            if self.num_doubts != ledger.num_doubts:
                self.num_doubts = ledger.num_doubts
                ledger.compare_first(self, signed)
            self.is_touched = True
            ledger.touched.append(self)
        self.num_collectives = number
        self.recent.append(signed)
        if gate.is_closed:
            gate.note_begun()
        return _begin(self, label, call, args, kwargs, number)

    return begin


def _message(method: str) -> Callable[..., Any]:
    label = _LABELS.get(method, method)

    def begin(self: TrackedGroup, *args: Any, **kwargs: Any) -> Any:
        gate = self._ledger.gate
        if gate.is_closed:
            gate.enter(self.size())
        call = getattr(self._inner, method)
        if method == "recv_anysource":
            work = _begin(self, label, call, args, kwargs, 0)
            self._settle_from_anyone()
            self._from_anyone.append(work)
            return PatientReceive(work, self._ledger.patience)
        peer = self.global_rank(
            args[1] if len(args) > 1 else kwargs["dstRank" if method == "send" else "srcRank"]
        )
        counts = self._num_sent if method == "send" else self._num_received
        sequence = counts.get(peer, 0) + 1
        work = _begin(self, label, call, args, kwargs, sequence, peer)
        counts[peer] = sequence
        if gate.is_closed:
            gate.note_begun()
        return work

    return begin


def _passed_on(method: str) -> Callable[..., Any]:
    def call(self: TrackedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, method)(*args, **kwargs)

    return call


def _passed_on_property(name: str) -> property:
    def write(self: TrackedGroup, value: Any) -> None:
        setattr(self._inner, name, value)

    return property(lambda self: getattr(self._inner, name), write)


@functools.cache
def is_operation(name: str) -> bool:
    """Return whether a method of ``ProcessGroup`` begins a collective or a message."""
    found = _RETURNS_WORK.search(getattr(ProcessGroup, name, object).__doc__ or "")
    return name == "monitored_barrier" or bool(found and not name.endswith("_coalescing"))


def pass_on_everything(kind: type[TrackedGroup]) -> None:
    """Add to `HealableGroup` the methods and properties of ``ProcessGroup`` that it lacks."""
    left_alone = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
    )
    for name in dir(ProcessGroup):
        member = getattr(ProcessGroup, name)
        if name.startswith(("__", "_pybind11")) or name in _OF_CPP or name in vars(kind):
            continue
        made: Any
        if isinstance(member, property):
            made = _passed_on_property(name)
        elif name in _POINT_TO_POINT:
            made = _message(name)
        elif is_operation(name):
            made = _collective(name)
        else:
            made = _passed_on(name)
        if not isinstance(made, property):
            made.__name__ = name
            made.__doc__ = member.__doc__
            # torch.compile breaks its graph at a call, as at the C++ method that this stands for,
            # and leaves what is called as it is: it cannot read a Python attribute of a process
            # group.
            made._torchdynamo_disable = True
            eval_frame.set_code_exec_strategy(made.__code__, left_alone)
        setattr(kind, name, made)
