"""Process groups over the ranks of two meshes (`cellmesh.link`), on a rank.

A link is connected again after each failure in either mesh. The ranks of both meet in the c10d
store of one, under the number of the connection; as one may give up the wait while others begin to
connect, the last to come or the first to leave decides for all.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, _unregister_process_group
from torch.distributed import DistError, DistStoreError

from ..errors import GroupDown
from ..stdlib import threading, time
from ..wire.codec import Frame
from ..wire.groups import FindStore, LinkRequest, SetLink
from .groups import connections, default_group
from .groups.group_factory import TIMEOUT, GroupPlan, Transport, call_for
from .groups.groups import Making
from .groups.healable_group import Down, HealableGroup
from .groups.store import MeshStore
from .linux_process import start_thread

if TYPE_CHECKING:
    from .groups.groups import Groups
    from .rank.features import RankContext

# How long the ranks may take to connect once all are there.
_CONNECT_S = 15.0
# How long an operation on an earlier connection may go on: its data may have been sent.
_GRACE_S = 1.0


class _Pending(Down):
    """Stands in for the plain ``ProcessGroup`` of a link that is not connected: the first operation
    connects it.
    """

    def __init__(self, link: LinkedGroup) -> None:
        super().__init__("")
        self._link = link

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._link.join()
        return getattr(self._link.inner, name)


class LinkedGroup(HealableGroup):
    """A process group over this mesh's ranks and another's, which is connected again and again.

    Args:
        groups: process groups of the rank.
        spec: the link's first state.

    Attributes:
        spec: the link's state.
        since: when it got this state, by ``time.monotonic``.
    """

    def __init__(self, groups: Groups, spec: SetLink) -> None:
        label = f"link {spec.name!r}"
        plan = GroupPlan(label, (), spec.backend, "", label, TIMEOUT.total_seconds())
        super().__init__(groups.ledger, plan, spec.first + groups.rank, spec.size)
        self.record.is_linked = True
        self._groups, self._lock = groups, threading.Lock()
        self._store = MeshStore(spec.address, spec.port, groups.ledger.waits)
        # Groups of earlier connections, on which operations may still be in flight.
        self._retired: list[tuple[Any, Transport]] = []
        self.begin(spec)

    def begin(self, spec: SetLink) -> None:
        """Take another state: operations that begin from now on are on another connection, or
        raise.
        """
        with self._lock:
            if self.inner is not None:
                self._retired.append((self.inner, self.transport))
            self.spec, self.since, self._attempt = spec, time.monotonic(), 0
            can_connect = spec.state != "dropped" and not spec.lack
            self._inner = _Pending(self) if can_connect else Down(self._explain())
            self.transport, self.is_up = Transport(), False
            self.record.restart()
            if can_connect and (spec.address, spec.port) != (self._store.host, self._store.port):
                self._store.move(spec.port, spec.address)

    @property
    def place(self) -> tuple[int, int, str]:
        """This rank in the group, the number of ranks, and the backend string."""
        return self.rank(), self.size(), self.plan.backend

    def _explain(self) -> str:
        return f"the {self.record.label} is down: {self.spec.lack or self.spec.reason}"

    def enter(self) -> None:
        """Register the group in torch's present registries; ``src`` and ``dst`` of operations are
        then its own ranks.
        """
        if self not in c10d._world.pg_names:
            _unregister_process_group(self.group_name)
            default_group.enter(self, self.plan.backend, self._store, None)
            c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(self.size())}

    def join(self, limit_s: float = math.inf) -> None:
        """Connect the group, once all of its ranks are there. On the main thread.

        Raises:
            GroupDown: the link is down, or the ranks are not there in time.
        """
        until = time.monotonic() + limit_s
        try:
            while not self.is_up:
                spec, attempt, label = self.spec, self._attempt, self.record.label
                if spec.state == "dropped" or spec.lack:
                    raise GroupDown(self._explain())
                self._groups.making = Making(self.record.name, (), time.monotonic(), label)
                place = f"cellmesh-link/{spec.name}/{spec.number}/{attempt}"
                try:
                    if self._meet(PrefixStore(place, self._store), spec, until):
                        self._connect(spec, PrefixStore(f"{place}/groups", self._store))
                except RuntimeError:
                    if self.spec is spec:
                        raise
                finally:
                    self._attempt = attempt + 1 if self.spec is spec else self._attempt
                if self.spec is not spec and self.spec.state == "failed":
                    raise GroupDown(self._explain())
        finally:
            self._groups.making = None

    def _meet(self, store: Any, spec: SetLink, until: float) -> bool:
        """Wait until all ranks are there; return False if one has given up, or if the link has
        another state.
        """
        left_s = until - time.monotonic()
        if store.add("here", 1) == self.size():
            store.compare_set("decided", "", "all")
        try:
            self._ledger.waits.until(
                lambda: self.spec is not spec or store.check(["decided"]),
                left_s,
                f"the ranks of the {self.record.label}",
            )
        except BaseException as error:
            with contextlib.suppress(DistError):
                decided = bytes(store.compare_set("decided", "", "given up"))
                if decided == b"all" and time.monotonic() > until and self.spec is spec:
                    return True
            if isinstance(error, DistStoreError) and time.monotonic() > until:
                raise GroupDown(f"not all ranks were there within {left_s:.0f} s") from None
            raise
        return self.spec is spec and bytes(store.get("decided")) == b"all"

    def _connect(self, spec: SetLink, store: Any) -> None:
        name = f"{self.record.name} {spec.number}.{self._attempt}"
        plan = msgspec.structs.replace(self.plan, name=name, ranks=tuple(range(self.size())))
        asked = call_for(plan, self.rank(), store) | {"global_ranks_in_group": []}
        made, transport = self._groups.make_apart(asked, self._store, _CONNECT_S)
        with self._lock:
            if self.spec is spec:
                self.connect(made, transport)
            else:
                self._retired.append((made, transport))

    def cut_retired(self) -> None:
        """End the operations on earlier connections, which raise."""
        with self._lock:
            retired, self._retired = self._retired, []
        for inner, transport in retired:
            connections.cut_gloo(transport.gloo, transport.sockets, self._ledger.kept)
            connections.abort_nccl(inner)
        start_thread(retired.clear)  # as in `take_down`

    def cut(self) -> int:
        num_cut = super().cut()
        self.cut_retired()
        return num_cut

    def _gives_up_soon(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Do nothing: ``destroy_process_group`` destroys no group of the notebook's."""


class LinksHandler:
    """Keeps the links of one rank, as the notebook says.

    Args:
        context: context of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._lock = threading.Lock()

    def handle(self, request: SetLink, buffers: tuple[Frame, ...]) -> str:
        """Give a link another state, and connect it; return why that has failed, "" if not."""
        link = self._set(request)
        if link is None:
            return ""
        link.cut_retired()
        if request.number == link.spec.number and request.patience_s and not link.is_up:
            try:
                link.join(request.patience_s)
            except RuntimeError as error:  # also a `GroupDown` or ``DistError``
                return str(error)
        return "" if link.is_up else "it is not connected"

    def handle_beside(self, request: LinkRequest) -> str:
        """Answer a request while the main thread may wait in an operation on the link."""
        if isinstance(request, FindStore):
            return self._context.groups.store_address
        link = self._set(request)
        if link is not None and link.spec is request:
            before = link.since
            time.sleep(_GRACE_S)
            self._context.release_from(link.record, before, request.reason)
            link.cut_retired()
        return ""

    def _set(self, request: SetLink) -> LinkedGroup | None:
        groups = self._context.groups
        with self._lock:
            link: LinkedGroup | None = groups.links.get(request.name)
            if link is not None and link.spec.number >= request.number:
                return link
            place = request.first + groups.rank, request.size, request.backend
            if request.state != "dropped" and (link is None or link.place != place):
                if link is not None:
                    gone = f"{request.reason}; cellmesh.group({request.name!r}) has the new one"
                    link.begin(msgspec.structs.replace(link.spec, state="dropped", reason=gone))
                    start_thread(link.cut_retired)
                link = groups.links[request.name] = LinkedGroup(groups, request)
            elif link is not None:
                link.begin(request)
            return link


make_handler = LinksHandler
