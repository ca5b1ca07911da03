"""A process group whose connections can be made anew while users' models go on holding it.

``HealableGroup`` is what ``torch.distributed`` and everything above it see; the work is done by an inner,
plain ``ProcessGroup``, which is replaced when the group is healed. The methods that pass through are read off
``ProcessGroup`` as it is installed: newer versions of torch call names that older ones do not have.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    ProcessGroup,
    Work,
)
from torch.futures import Future

from ...errors import GroupDown
from ...wire.looks import What
from ...wire.messages import GroupCount
from . import cutting
from .ledger import Ledger, has_ended_well
from .patience import NotedMessage, PatientCollective, PatientReceive

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
# Where DDP's C++ is called from: the engine, on the thread that called ``backward`` or on one of its own.
_BACKWARD = ("torch.autograd.graph", "torch.autograd", "")
_RETURNS_WORK = re.compile(r"-> \S*\bWork\b")
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
# What a group answers itself, and what only makes sense on the C++ object.
_OWN = frozenset(
    {
        "rank",
        "size",
        "shutdown",
        "abort",
        "group_name",
        "group_desc",
        "_set_group_name",
        "_set_group_desc",
        "bound_device_id",
        "split_group",
        "boxed",
        "unbox",
        "BackendType",
    }
)


class _Down:
    """Stands in for the inner group while there is none."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupDown(self._text)


class _Silent:
    """Stands in for the inner group of a rank that is to believe itself."""

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        done: Future[None] = Future()
        done.set_result(None)
        work: Work = _c10d._create_work_from_future(done)  # type: ignore[attr-defined]
        return work


class HealableGroup(ProcessGroup):
    """A process group that passes everything on to an inner one.

    It begins without: `connect` gives it one.

    Args:
        ledger: where it notes what it begins.
        name: torch's name of the group.
        description: torch's description of it.
        ranks: global ranks of its members; () for all.
        rank: this rank's number in it.
        size: number of its members.
    """

    def __init__(
        self, ledger: Ledger, name: str, description: str, ranks: tuple[int, ...], rank: int, size: int
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._ledger = ledger
        self._name, self._description = c10d.GroupName(name), description
        super()._set_group_name(c10d.GroupName(name))
        super()._set_group_desc(description)
        self._ranks = ranks
        self._device_id: Any = None
        self._inner: Any = None
        self.sockets: dict[int, int] = {}
        self.is_up = self.is_gloo = False
        self.recipe: dict[str, Any] = {}
        self.timeouts: dict[str, timedelta] = {}
        self.adopt_split: Callable[[Any, Sequence[int]], HealableGroup] | None = None
        self.take_down("it has not been connected yet")

    # Its connections.

    def connect(self, inner: Any, sockets: dict[int, int]) -> None:
        """Work through `inner` from now on; counts start anew."""
        self._inner = inner
        self.is_gloo = {backend.name() for backend in cutting.backends_of(inner)} == {"gloo"}
        self.sockets = sockets
        self._reset_counts()
        self.is_up = True

    def take_down(self, why: str) -> None:
        """Let operations raise `GroupDown` until the next `connect`."""
        members = f"of ranks {', '.join(map(str, self._ranks))}" if self._ranks else "of all ranks"
        text = f"the process group {self._name!r} {members} is down: {why}. %dist_heal connects it again"
        self.is_up = False
        # Its end waits for gloo's threads, and one of them may wait without end for a rank that died.
        retired, self._inner = [self._inner], _Down(text)
        if type(retired[0]) is not _Down and retired[0] is not None:
            threading.Thread(target=retired.clear, name="cellmesh-retire", daemon=True).start()
        self.sockets = {}
        self._reset_counts()

    def cut(self) -> int:
        """Make blocked operations raise, from any thread; the group is of no use until it is healed.

        Returns:
            How many connections were cut.
        """
        sockets, self.sockets = self.sockets, {}
        inner = self.inner
        if inner is None:
            return 0
        return cutting.cut_gloo(inner, sockets, self._ledger.drain) + cutting.abort_nccl(inner)

    @property
    def inner(self) -> Any:
        """The plain group that does the work; None while the group is down."""
        inner = self._inner
        return None if type(inner) is _Down else inner

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Broadcasts leave every rank with what it has."""
        inner, self._inner = self._inner, _Silent()
        try:
            yield
        finally:
            self._inner = inner

    # What it has begun.

    def _reset_counts(self) -> None:
        self.num_collectives = 0
        self.whats: dict[str, What] = {}
        self.is_touched = False
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}
        self._from_anyone: list[Work] = []
        self._backward_work: Work | None = None

    @property
    def has_failed_in_backward(self) -> bool:
        """Whether the last operation that DDP has begun did not end well: its gradients are not reduced."""
        work = self._backward_work
        return work is not None and not has_ended_well(work)

    def forget_backward(self) -> None:
        """Let go of the last backward pass, if it ended well: its Work holds on to gradients."""
        if not self.has_failed_in_backward:
            self._backward_work = None

    def count(self, with_messages: bool = True) -> GroupCount:
        """How much it has begun since it was made or healed."""
        if not with_messages:
            return GroupCount(self._name, self._ranks, self.num_collectives)
        self._settle_from_anyone()
        return GroupCount(
            self._name,
            self._ranks,
            self.num_collectives,
            tuple(sorted(self._num_sent.items())),
            tuple(sorted(self._num_received.items())),
        )

    def global_rank(self, rank: int) -> int:
        """The global rank of a member."""
        return self._ranks[rank] if self._ranks else rank

    def what(self, label: str) -> What:
        """What its operations of one kind have in common; the same object until it is connected anew."""
        name, generation = str(self._name), self._ledger.generation
        return self.whats.setdefault(label, What(label, name, self._ranks, generation, not self.is_gloo))

    def _settle_from_anyone(self) -> None:
        """Count messages that anyone could send: whose they were shows when they have come."""
        pending, self._from_anyone = self._from_anyone, []
        for work in pending:
            if not work.is_completed():
                self._from_anyone.append(work)
            elif (source := work._source_rank()) >= 0:
                source = self.global_rank(source)
                self._num_received[source] = self._num_received.get(source, 0) + 1

    # What is not simply passed on.

    @property
    def group_name(self) -> c10d.GroupName:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = c10d.GroupName(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def bound_device_id(self) -> Any:
        # With a device, torch would split new communicators off the default group's: not when rebuilding,
        # which is not done by all ranks and finds the default group's aborted.
        return None if self._ledger.is_rebuilding else self._device_id

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        self._device_id = device
        if self.is_up:
            self._inner.bound_device_id = device

    def getBackendName(self) -> str:
        # For C++ only: where DDP's logger reads "gloo" it looks for gloo's own object, in this one.
        return "healable"

    def shutdown(self) -> None:
        self._ledger.forget(self)  # it is being destroyed
        if self.is_up:
            self._inner.shutdown()

    def abort(self) -> None:
        if self.is_up:
            self._inner.abort()

    def split_group(self, new_ranks: Sequence[int], *args: Any, **kwargs: Any) -> ProcessGroup | None:
        inner = self._inner.split_group(new_ranks, *args, **kwargs)
        if inner is None or self.adopt_split is None:
            return None
        return self.adopt_split(inner, [self.global_rank(rank) for rank in new_ranks])

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object")


def _begin(
    group: HealableGroup,
    label: str,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    sequence: int,
    peer: int = -1,
) -> Any:
    """Run a method of the inner group, and note it as the last operation while it is under way."""
    ledger = group._ledger
    ident = threading.get_ident()
    # The engine's threads, unknown to Python, run backward on behalf of the main thread.
    if ident != ledger.main_thread and ident in threading._active:  # type: ignore[attr-defined]
        return call(*args, **kwargs)
    since = time.monotonic()
    ledger.last = (label, group, since, None)
    spans, number = ledger.spans, -1
    is_message = label in _POINT_TO_POINT
    # Whether a wait in Python follows at once. Messages do not tell: their wait does.
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
    caller = _module_of(sys._getframe(1).f_back)
    if caller == c10d.__name__ and not _is_of_join(sys._getframe(1)):
        if group.is_gloo:
            if is_message:  # it has no future
                work = NotedMessage(work, ledger.patience, spans, number)
            else:
                if not is_sync:
                    spans.end_with(work, number)
                work = PatientCollective(work, ledger.patience, spans, number, is_sync)
        # Its caller waits for it or gives it to the user: it lives while anyone may wait.
        ledger.last = (label, group, since, weakref.ref(work))
    else:  # C++ (DDP, also under Join, functional collectives) keeps it where Python does not see that
        ledger.last = (label, group, since, lambda: work)
        if group.is_gloo:
            spans.end_with(work, number)
        if caller in _BACKWARD:
            group._backward_work = work
        else:  # most often used at once; what C++ waits for is not seen
            spans.wait(number, since)
    return work


def _is_of_join(method: types.FrameType) -> bool:
    """Whether ``Join`` has begun this for DDP, which keeps the C++ part only; a `wait` in Python is lost."""
    function = method.f_back  # dist.all_reduce; round it the wrapper that logs its errors
    wrapper = function and function.f_back
    caller = wrapper and wrapper.f_back
    is_of_join = _module_of(caller) == "torch.distributed.algorithms.join"
    return is_of_join and function is not None and bool(function.f_locals.get("async_op"))


def _module_of(frame: types.FrameType | None) -> str:
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _collective(method: str) -> Callable[..., Any]:
    label = _LABELS.get(method, method)

    def begin(self: HealableGroup, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self._inner, method)
        self.num_collectives += 1
        if not self.is_touched:
            self.is_touched = True
            self._ledger.touched.append(self)
        return _begin(self, label, call, args, kwargs, self.num_collectives)

    return begin


def _message(method: str) -> Callable[..., Any]:
    label = _LABELS.get(method, method)

    def begin(self: HealableGroup, *args: Any, **kwargs: Any) -> Any:
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
        return work

    return begin


def _passed_on(method: str) -> Callable[..., Any]:
    def call(self: HealableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, method)(*args, **kwargs)

    return call


def _passed_on_property(name: str) -> property:
    def write(self: HealableGroup, value: Any) -> None:
        setattr(self._inner, name, value)

    return property(lambda self: getattr(self._inner, name), write)


def _pass_on_everything() -> None:
    """Give `HealableGroup` each method and property of the installed ``ProcessGroup``."""
    for name in dir(ProcessGroup):
        member = getattr(ProcessGroup, name)
        if name.startswith("__") or name.startswith("_pybind11") or name in _OWN:
            continue
        made: Any
        if isinstance(member, property):
            made = _passed_on_property(name)
        elif name in _POINT_TO_POINT:
            made = _message(name)
        elif name == "monitored_barrier" or (
            _RETURNS_WORK.search(member.__doc__ or "") and not name.endswith("_coalescing")
        ):
            made = _collective(name)
        else:
            made = _passed_on(name)
        if not isinstance(made, property):
            made.__name__ = name
            made.__doc__ = member.__doc__
        setattr(HealableGroup, name, made)


_pass_on_everything()
