"""A process group that can be reconnected while the user's models keep holding it.

``torch.distributed`` and all code above it use a ``HealableGroup``; the work is done by an inner,
plain ``ProcessGroup``, which is replaced when the group is healed. The forwarded methods are read
from the installed ``ProcessGroup``, as newer versions of torch call methods that older ones lack.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work
from torch._C._dynamo import eval_frame
from torch.futures import Future

from ...errors import GroupDown
from ...stdlib import threading, time
from ...wire.trace import What
from ..linux_process import start_thread
from ..static_lookup import module_of
from . import connections
from .any_backend import ForeignGroup, ForeignWork, abort_foreign, is_foreign, shut_down_foreign
from .group_factory import GroupPlan, Transport
from .ledger import MESSAGES, GroupRecord, Ledger, Operation, signer
from .waits import GlooWork, PatientWork

# Public names of ProcessGroup's methods; a `_coalesced` or unknown one keeps its own name.
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
# Modules from which DDP's C++ code is called: the autograd engine, on the thread that called
# ``backward`` or on a thread of its own.
_BACKWARD = ("torch.autograd.graph", "torch.autograd", "")
_RETURNS_WORK = re.compile(r"-> \S*\bWork\b")
# Waiting for a message in another thread takes some 50 us longer. Smaller messages are rarely in
# flight when a rank dies; their wait then ends with the group's time-out or the rank.
_LARGE_BYTES = 64 << 10
# Operations with at most this time-out are ended by it, not by a cut.
_SOON_S = 10.0
# Members that make sense only on the C++ object.
_OF_CPP = frozenset({"rank", "size", "boxed", "unbox", "BackendType"})
# Inner groups that were taken down when no thread could be started to destroy them.
_kept: list[Any] = []


class Down:
    """Stands in for the plain ``ProcessGroup`` of a `HealableGroup` that is down; every
    operation raises `GroupDown`.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupDown(self._text)


def ended_work() -> Work:
    """Return a Work that has already ended, for an operation with nothing to do."""
    done: Future[None] = Future()
    done.set_result(None)
    work: Work = _c10d._create_work_from_future(done)  # type: ignore[attr-defined]
    return work


class HealableGroup(ProcessGroup):
    """A process group that forwards its operations to a plain ``ProcessGroup``, which `connect`
    sets and a heal replaces.

    Args:
        ledger: ledger of the rank.
        plan: the data to make the group again.
        rank, size: this rank's number in the group, and the number of members.
        recipe: arguments of ``_new_process_group_helper`` that make the group.
    """

    # With a device, torch would split NCCL's communicators, which a heal cannot.
    bound_device_id: Any = None

    def __init__(
        self,
        ledger: Ledger,
        plan: GroupPlan,
        rank: int,
        size: int,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._ledger, self.plan, self.recipe = ledger, plan, recipe or {}
        soon = weakref.WeakMethod(self._gives_up_soon)
        self.record = GroupRecord(
            plan.name, plan.description, plan.ranks, lambda: bool((here := soon()) and here())
        )
        super()._set_group_name(c10d.GroupName(plan.name))
        super()._set_group_desc(plan.description)
        self._inner: Any = None
        self.transport = Transport()
        self.is_up = self.is_gloo = self.is_destroyed = False
        self._is_foreign = self._is_aborted = False
        self.take_down("it has not been connected yet")

    # ---- connecting and cutting

    def connect(self, plain: Any, transport: Transport) -> None:
        """Forward operations to the connected ``ProcessGroup`` `plain` from now on, and reset the
        operation counts.
        """
        backends = connections.backends_of(plain)
        self.is_gloo = {connections.name_of_backend(one) for one in backends} == {"gloo"}
        self._is_foreign, self._is_aborted = is_foreign(plain), False
        self._inner = plain
        if self._is_foreign:
            self._inner = ForeignGroup(plain, self._ledger.waits, is_operation)
        self.transport = transport
        self.record.restart()
        self.is_up = True

    @property
    def sockets(self) -> dict[int, int]:
        """The group's connections (descriptor -> inode); if one is lost, the group is broken."""
        # A third-party backend may open and close its connections at any time.
        has_gloo = self.transport.gloo or not self._is_foreign
        return self.transport.sockets if has_gloo else {}

    def take_down(self, why: str, remedy: str = "%dist_heal connects it again") -> None:
        """Drop the inner ``ProcessGroup``: operations on this group raise `GroupDown` until the
        next `connect`.
        """
        ranks = self.plan.ranks
        members = f"of ranks {', '.join(map(str, ranks))}" if ranks else "of all ranks"
        text = f"the process group {self.record.name!r} {members} is down: {why}. {remedy}"
        self.is_up = False
        # Destroying the inner group waits for gloo's threads, one of which may wait forever for a
        # rank that died: do it on another thread.
        if self._is_foreign and self.inner is not None:
            shut_down_foreign(self.inner)
        retired: list[Any] = [self.inner, self.transport]
        self._inner, self.transport = Down(text), Transport()
        has_ended = retired[0] is None or start_thread(retired.clear)
        if not has_ended:
            _kept.append(retired)
        self.record.restart()

    def cut(self) -> int:
        """Close or abort the group's connections, so that blocked operations on the group raise;
        return the number of connections. Any thread may call it.
        """
        sockets, transport = self.sockets, self.transport
        self.transport = emptied = Transport(gloo=transport.gloo)
        inner = self.inner
        if inner is None:
            return 0
        num_cut = connections.cut_gloo(transport.gloo, sockets, self._ledger.kept)
        num_cut += connections.abort_nccl(inner)
        if self._is_foreign and not self._is_aborted:
            self._is_aborted = True
            abort_foreign(inner)
            num_cut += 1
        if not num_cut and self.transport is emptied:
            # Connections, if any, were lost before: keep them, as they show that it is broken.
            self.transport = transport
        return num_cut

    @property
    def inner(self) -> Any:
        """The plain ``ProcessGroup`` that does the work; None while the group is down."""
        inner = self._inner
        if type(inner) is ForeignGroup:
            return inner.plain
        return None if isinstance(inner, Down) else inner

    def _gives_up_soon(self) -> bool:
        """Return whether the group's own time-out, chosen by the program, is `_SOON_S` at most."""
        try:
            backends = connections.backends_of(self._inner)
            limits = [backend.options._timeout for backend in backends]
        except Exception:  # down, or a third-party backend
            return False
        return bool(limits) and max(limits).total_seconds() <= _SOON_S

    @property
    def has_failed_in_backward(self) -> bool:
        """Whether the last collective of DDP's backward pass on this group has not succeeded, so
        that gradients are not reduced.
        """
        return self.record.has_failed_in_backward

    # ---- members that are not simply forwarded

    @property
    def group_name(self) -> c10d.GroupName:
        return c10d.GroupName(self.record.name)

    @property
    def group_desc(self) -> str:
        return self.record.description

    def _set_group_name(self, name: str) -> None:
        self.record.name = name

    def _set_group_desc(self, description: str) -> None:
        self.record.description = description

    def getBackendName(self) -> str:
        # For C++ only: given "gloo", DDP's logger would look for a ProcessGroupGloo in this object.
        return "healable"

    def shutdown(self) -> None:
        self.is_destroyed = True
        self._ledger.forget(self.record)
        if self.is_up:
            self._inner.shutdown()

    def abort(self) -> None:
        if self.is_up:
            self._inner.abort()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object")


# ---- forwarded methods


def _begin(
    group: HealableGroup,
    label: str,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    sequence: int,
    peer: int = -1,
) -> Any:
    """Call a method of the inner ``ProcessGroup`` for a `HealableGroup`, and record the operation
    in the rank's `Ledger`.
    """
    ledger, record = group._ledger, group.record
    ident = threading.get_ident()
    # The engine's threads, which are not in `threading`, run backward for the main thread.
    if ident != ledger.main_thread and ident in threading._active:  # type: ignore[attr-defined]
        return call(*args, **kwargs)
    since = time.monotonic()
    operation = Operation(label, record, since, sequence, peer)
    ledger.begin(operation)
    spans, number = ledger.spans, -1
    is_message = label in MESSAGES
    # Whether Python waits at once; for messages this shows only when `wait` is called.
    is_sync = not getattr(args[-1] if args else kwargs.get("opts"), "asyncOp", True)
    if spans.is_on:
        what = record.whats.get(label)
        if what is None:
            what = record.whats[label] = What(
                label, record.name, record.ranks, ledger.generation, not group.is_gloo
            )
        number = spans.begin(what, sequence, peer, since, is_sync)
    work = None
    try:
        work = call(*args, **kwargs)
    finally:
        if not isinstance(work, Work):
            ledger.last = None
            spans.end(number)
    if not isinstance(work, Work):
        return work
    if not group.is_gloo:
        spans.end(number)  # the span of the launch: the GPU continues on its own
    caller = module_of(sys._getframe(1).f_back)
    is_of_join = caller == c10d.__name__ and _is_of_join(sys._getframe(1))
    if is_of_join and type(work) is ForeignWork:
        work = work._work
    if caller == c10d.__name__ and not is_of_join:
        if group.is_gloo:
            runs = is_message and (  # a collective has a future instead
                peer < 0 or sum(tensor.nbytes for tensor in args[0]) >= _LARGE_BYTES
            )
            if not is_message and not is_sync:
                spans.end_with(work, number)
            is_noted = is_sync and not is_message
            work = GlooWork(work, ledger.waits, spans, number, is_noted, is_message, runs)
        # The caller waits for it or returns it to the user: it lives as long as anyone may wait.
        operation.find_work = weakref.ref(work)
        return work
    # C++ (DDP, also under Join, functional collectives) may hold it where Python cannot see that.
    inner = work
    operation.find_work = lambda: inner
    if caller in _BACKWARD:
        record.backward_work = inner
    if group.is_gloo:
        spans.end_with(inner, number)
        if not is_of_join and not is_message:
            work = GlooWork(inner, ledger.waits, spans, number)
    elif caller not in _BACKWARD:  # usually waited for at once; a wait in C++ is not visible
        spans.wait(number, since)
    return work


def _is_of_join(method: types.FrameType) -> bool:
    """Return whether torch's ``Join`` context has begun an operation for DDP, whose C++ code keeps
    only the C++ Work.
    """
    function = method.f_back  # dist.all_reduce; its caller is the wrapper that logs errors
    wrapper = function and function.f_back
    caller = wrapper and wrapper.f_back
    is_of_join = module_of(caller) == "torch.distributed.algorithms.join"
    return is_of_join and function is not None and bool(function.f_locals.get("async_op"))


def _collective(method: str) -> Callable[..., Any]:
    label = _LABELS.get(method, method)
    sign = signer(method)

    def begin(self: HealableGroup, *args: Any, **kwargs: Any) -> Any:
        ledger, record = self._ledger, self.record
        gate = ledger.gate
        if ledger.may_begin is not None and self.size() > 1:
            ledger.may_begin(label)
        if gate.is_closed:
            gate.enter(self.size())
        call = getattr(self._inner, method)
        number = record.num_collectives + 1
        signed = (number, label, *sign(args, kwargs))
        if not record.is_touched:
            if record.num_doubts != ledger.num_doubts:
                record.num_doubts = ledger.num_doubts
                ledger.compare_first(record, signed, self.size())
            record.is_touched = True
            ledger.touched.append(record)
        record.num_collectives = number
        record.recent.append(signed)
        if gate.is_closed:
            gate.note_begun()
        return _begin(self, label, call, args, kwargs, number)

    return begin


def _message(method: str) -> Callable[..., Any]:
    label = _LABELS.get(method, method)

    def begin(self: HealableGroup, *args: Any, **kwargs: Any) -> Any:
        gate, record = self._ledger.gate, self.record
        if gate.is_closed:
            gate.enter(self.size())
        call = getattr(self._inner, method)
        if method == "recv_anysource":
            work = _begin(self, label, call, args, kwargs, 0)
            record.settle_from_anyone()
            record.from_anyone.append(work)
            if isinstance(work, PatientWork) or not isinstance(work, Work):
                return work
            # Of a group with other backends too: gloo itself never ends the wait for any sender.
            ledger = self._ledger
            return GlooWork(work, ledger.waits, ledger.spans, -1, is_message=True, runs=True)
        peer = record.global_rank(
            args[1] if len(args) > 1 else kwargs["dstRank" if method == "send" else "srcRank"]
        )
        counts = record.num_sent if method == "send" else record.num_received
        sequence = counts.get(peer, 0) + 1
        work = _begin(self, label, call, args, kwargs, sequence, peer)
        counts[peer] = sequence
        if gate.is_closed:
            gate.note_begun()
        return work

    return begin


def _passed_on(method: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._inner, method)(*args, **kwargs)


def _passed_on_property(name: str) -> property:
    return property(
        lambda self: getattr(self._inner, name),
        lambda self, value: setattr(self._inner, name, value),
    )


@functools.cache
def is_operation(name: str) -> bool:
    """Return whether a method of ``ProcessGroup`` begins a collective, a send or a receive."""
    found = _RETURNS_WORK.search(getattr(ProcessGroup, name, object).__doc__ or "")
    return name == "monitored_barrier" or bool(found and not name.endswith("_coalescing"))


def _pass_on_everything() -> None:
    """Add each member of ``ProcessGroup`` that `HealableGroup` does not define to `HealableGroup`,
    forwarding to the inner group.
    """
    skip = eval_frame._FrameAction.SKIP
    left_alone = eval_frame._FrameExecStrategy(skip, skip)
    for name in dir(ProcessGroup):
        member = getattr(ProcessGroup, name)
        if name.startswith(("__", "_pybind11")) or name in _OF_CPP or name in vars(HealableGroup):
            continue
        if isinstance(member, property):
            setattr(HealableGroup, name, _passed_on_property(name))
            continue
        if name in MESSAGES:
            made: Any = _message(name)
        else:
            made = _collective(name) if is_operation(name) else _passed_on(name)
        made.__name__ = name
        made.__doc__ = member.__doc__
        # torch.compile breaks its graph at this call, as at the C++ method's, and does not trace
        # into it: it cannot read Python attributes of a process group.
        made._torchdynamo_disable = True
        eval_frame.set_code_exec_strategy(made.__code__, left_alone)
        setattr(HealableGroup, name, made)


_pass_on_everything()
