"""A process group that can be reconnected while the user's models keep holding it.

``HealableGroup`` is what ``torch.distributed`` and everything above it see; the work is done by an
inner, plain ``ProcessGroup``, which is replaced when the group is healed; `op_tracking` forwards
to it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.futures import Future

from ...errors import GroupDown
from ...wire.groups import Begun, GroupCount, label_of
from ...wire.trace import What
from ..linux_process import start_thread
from . import abort
from .any_backend import ForeignGroup, abort_foreign, is_foreign, shut_down_foreign
from .group_factory import GroupPlan, Transport
from .op_tracking import Ledger, has_ended_well, is_operation, pass_on_everything
from .signatures import NUM_RECENT, Signed, as_begun

# Groups that were taken down where there was no thread to end them in.
_kept: list[Any] = []


class _Down:
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
    """Return a Work that has ended already, for an operation that has nothing to do."""
    done: Future[None] = Future()
    done.set_result(None)
    work: Work = _c10d._create_work_from_future(done)  # type: ignore[attr-defined]
    return work


# Operations whose own time-out is at most this are left to it.
_SOON_S = 10.0


class _Silent:
    """Stands in for the plain ``ProcessGroup`` of a `HealableGroup` while broadcasts must not
    overwrite this rank's tensors: they do nothing.
    """

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        return ended_work()


class HealableGroup(ProcessGroup):
    """A process group that forwards its operations to a plain ``ProcessGroup``, which `connect`
    sets and a heal replaces.

    Its name and description are torch's, its ranks the mesh's (() for all); `rank` counts in it.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        description: str,
        ranks: tuple[int, ...],
        rank: int,
        size: int,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._ledger = ledger
        self._name, self._description = c10d.GroupName(name), description
        super()._set_group_name(c10d.GroupName(name))
        super()._set_group_desc(description)
        self._ranks = ranks
        self._device_id: Any = None
        self._inner: Any = None
        self._transport = Transport()
        self.is_up = self.is_gloo = self.is_destroyed = False
        self._is_foreign = self._is_aborted = False
        self.num_doubts = 0  # of the ledger's, when a collective was compared last
        self.recipe: dict[str, Any] = {}
        self.plan: GroupPlan
        self.timeouts: dict[str, timedelta] = {}
        self.adopt_split: Callable[[Any, Sequence[int]], HealableGroup] | None = None
        self.take_down("it has not been connected yet")

    # Its connections.

    def connect(self, plain: Any, transport: Transport) -> None:
        """Forward operations to the connected ``ProcessGroup`` `plain` from now on, and reset all
        operation counts.
        """
        backends = abort.backends_of(plain)
        self.is_gloo = {abort.name_of_backend(backend) for backend in backends} == {"gloo"}
        self._is_foreign, self._is_aborted = is_foreign(plain), False
        self._inner = plain
        if self._is_foreign:
            self._inner = ForeignGroup(plain, self._ledger.patience, is_operation)
        self._transport = transport
        self._reset_counts()
        self.is_up = True

    @property
    def sockets(self) -> dict[int, int]:
        """The connections of the group, which all stand as long as it works."""
        # A backend that is not torch's may open and close its own as it likes.
        has_gloo = self._transport.gloo or not self._is_foreign
        return self._transport.sockets if has_gloo else {}

    def retire(self, why: str) -> None:
        """Disconnect for good: let operations raise `GroupDown`."""
        self.take_down(why)
        self._inner = _Down(
            f"the process group {self._name!r} is down: {why}. Make again what holds it, on "
            "`mesh`; %dist_load gives it what %dist_save saved before"
        )

    def take_down(self, why: str) -> None:
        """Disconnect: let operations raise `GroupDown` until the next `connect`."""
        members = f"of ranks {', '.join(map(str, self._ranks))}" if self._ranks else "of all ranks"
        text = (
            f"the process group {self._name!r} {members} is down: "
            f"{why}. %dist_heal connects it again"
        )
        self.is_up = False
        # Its end waits for gloo's threads, and one of them may wait without end for a rank that
        # died.
        if self._is_foreign and self.inner is not None:
            shut_down_foreign(self.inner)
        retired: list[Any] = [self.inner, self._transport]
        self._inner, self._transport = _Down(text), Transport()
        has_ended = retired[0] is None or start_thread(retired.clear)
        if not has_ended:
            _kept.append(retired)
        self._reset_counts()

    def cut(self) -> int:
        """Make blocked operations raise, from any thread, until a heal; return their number."""
        sockets, transport = self.sockets, self._transport
        self._transport = emptied = Transport(gloo=transport.gloo)
        inner = self.inner
        if inner is None:
            return 0
        num_cut = abort.cut_gloo(transport.gloo, sockets, self._ledger.drain)
        num_cut += abort.abort_nccl(inner)
        if self._is_foreign and not self._is_aborted:
            self._is_aborted = True
            abort_foreign(inner)
            num_cut += 1
        if not num_cut and self._transport is emptied:
            # Its connections, if it has any, were lost before: by them it is seen to be broken.
            self._transport = transport
        return num_cut

    @property
    def inner(self) -> Any:
        """The plain ``ProcessGroup`` that does the work; None while the group is down."""
        inner = self._inner
        if type(inner) is ForeignGroup:
            return inner.plain
        return None if type(inner) is _Down else inner

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Enter a context in which broadcasts leave this rank's tensors unchanged."""
        inner, self._inner = self._inner, _Silent()
        try:
            yield
        finally:
            self._inner = inner

    # What it has begun.

    def _reset_counts(self) -> None:
        self.num_collectives = 0
        self.recent: deque[Signed] = deque(maxlen=NUM_RECENT)
        self.whats: dict[str, What] = {}
        self.is_touched = False
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}
        self._from_anyone: list[Work] = []
        self._backward_work: Work | None = None

    @property
    def has_failed_in_backward(self) -> bool:
        """Whether the last operation of DDP's backward pass failed to reduce gradients."""
        work = self._backward_work
        return work is not None and not has_ended_well(work)

    def forget_backward(self) -> None:
        """Drop the Work of DDP's last backward pass if it succeeded, as it holds gradients."""
        if not self.has_failed_in_backward:
            self._backward_work = None

    def count(self, with_messages: bool = True, with_recent: bool = False) -> GroupCount:
        """Return how many operations this rank began on the group since it was made or healed."""
        if not with_messages:
            return GroupCount(self._name, self._ranks, self.num_collectives)
        self._settle_from_anyone()
        return GroupCount(
            self._name,
            self._ranks,
            self.num_collectives,
            tuple(sorted(self._num_sent.items())),
            tuple(sorted(self._num_received.items())),
            self._description,
            self._recent() if with_recent else (),
        )

    @property
    def gives_up_soon(self) -> bool:
        """Whether the group's own time-out, which a program has chosen, ends a wait before long."""
        try:
            limits = [backend.options._timeout for backend in abort.backends_of(self._inner)]
        except Exception:  # down, or not of torch's backends
            return False
        return bool(limits) and max(limits).total_seconds() <= _SOON_S

    @property
    def label(self) -> str:
        """What users call the group."""
        return label_of(self._description, self._ranks)

    def _recent(self) -> tuple[Begun, ...]:
        while True:
            try:
                recent = list(self.recent)
            except RuntimeError:  # the main thread has begun one while they were copied
                continue
            return tuple(as_begun(*one, self._ranks) for one in recent)

    def global_rank(self, rank: int) -> int:
        """Return the mesh's rank of the member with this rank in the group."""
        return self._ranks[rank] if self._ranks else rank

    def what(self, label: str) -> What:
        """Return the trace fields (group, ranks, ...) that all operations of this name (`label`) on
        this group share until it is reconnected.
        """
        name, generation = str(self._name), self._ledger.generation
        return self.whats.setdefault(
            label, What(label, name, self._ranks, generation, not self.is_gloo)
        )

    def _settle_from_anyone(self) -> None:
        """Count ended receives from any rank for the ranks whose messages they received."""
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
        # With a device, torch would split new communicators off the default group's: not when
        # rebuilding, which is not done by all ranks and finds the default group's aborted.
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
        self.is_destroyed = True
        self._ledger.forget(self)
        if self.is_up:
            self._inner.shutdown()

    def abort(self) -> None:
        if self.is_up:
            self._inner.abort()

    def split_group(
        self, new_ranks: Sequence[int], *args: Any, **kwargs: Any
    ) -> ProcessGroup | None:
        inner = self._inner.split_group(new_ranks, *args, **kwargs)
        if inner is None or self.adopt_split is None:
            return None
        return self.adopt_split(inner, [self.global_rank(rank) for rank in new_ranks])

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object")


pass_on_everything(HealableGroup)
