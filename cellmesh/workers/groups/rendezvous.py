"""Lets ranks find each other: at a heal, and in programs' ``init_process_group`` and ``init_rpc``.

Under torchrun every process is a client of one store, and no process serves an address that a
program names itself; in a plain script rank 0 of the call serves it. Here an address (``env://``
with MASTER_ADDR and MASTER_PORT, ``tcp://``, ``file://``) is only a name: the ranks that call with
the same one meet over the mesh's store, each time under new keys. So no key of an earlier run of a
cell is read, no port has to be free, and a wait for ranks that have not called yet ends with
the first stop.

A process that a rank has forked or spawned is none of the mesh: torch's own ways are left to it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from ...errors import GroupDown
from . import rpc
from .group_factory import GroupPlan
from .model_reset import Progress, Survey, with_unsettled_buckets
from .store import InterruptibleStore, MeshStore, ProgramsTCPStore

_SCHEMES = ("env", "tcp", "file")
_YEAR_S = 365 * 86400.0
# How long ranks wait for each other at a heal.
_HEAL_PATIENCE = timedelta(seconds=60)


@dataclass
class Session:
    """The result on which the ranks of one ``init_process_group`` or ``init_rpc`` call have
    agreed: a number, the mesh ranks of the members, and a store.
    """

    number: int  # greater than that of every session which one of them had before
    # The mesh's rank of each rank of the call; () for a call of unknown size.
    members: tuple[int, ...]
    store: Any  # theirs alone
    keys: list[str]  # that this process has set in it


@dataclass(frozen=True)
class Call:
    """The address, rank and world size of a program's ``init_process_group`` or ``init_rpc``
    call; None for each that the call does not specify.
    """

    address: str | None
    rank: int | None
    size: int | None


class _Join(msgspec.Struct, frozen=True):
    """A rank's entry in the mesh's store while it waits for the other ranks of its call."""

    mesh_rank: int
    token: str
    last_number: int


class _Go(msgspec.Struct, frozen=True):
    """The entry in the mesh's store by which ranks see that every rank of a call has called."""

    number: int
    members: tuple[int, ...]
    prefix: str


def read_call(url: str, rank: int = -1, size: int = -1) -> Call:
    """Read a call from its ``init_method``, its arguments and, for ``env://``, the environment."""
    parts = urlparse(url)
    query = dict(pair.split("=", 1) for pair in parts.query.split("&") if "=" in pair)
    address: str | None = None
    if parts.scheme == "env":
        query = {
            "rank": os.environ.get("RANK", ""),
            "world_size": os.environ.get("WORLD_SIZE", ""),
        } | query
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        address = f"{_plain(host)}:{port}" if host and port else None
    elif parts.scheme == "tcp" and parts.port is not None:
        address = f"{_plain(parts.hostname or '')}:{parts.port}"
    elif parts.scheme == "file" and parts.path:
        address = f"file {os.path.normpath(parts.path)}"
    return Call(address, _number(rank, query.get("rank")), _number(size, query.get("world_size")))


def _plain(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _number(argument: int, text: str | None) -> int | None:
    if argument is not None and argument != -1:
        return argument
    return int(text) if text and text.lstrip("-").isdigit() else None


class Rendezvous:
    """Finds the other ranks of a program's call, through the mesh's store."""

    def __init__(self, store: MeshStore, prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self.world_size = store, prefix, rank, world_size
        self._pid = os.getpid()
        self._last_number = 0
        self._num_open: dict[str, int] = {}
        self._awaited: tuple[str, int] | None = None
        self._remote_session: Session | None = None
        self._generation = 0
        self._is_open = False
        self.for_group = False  # whether ``init_process_group`` asks; else it is ``init_rpc``
        # The last one that was agreed on for a process group.
        self.session: Session | None = None

    def begin_generation(self, generation: int) -> None:
        """Use other store keys from now on, so that no rank meets entries that ranks left in the
        store before a heal.
        """
        self._generation = generation
        self._num_open.clear()

    def install(self) -> None:
        """Replace torch's rendezvous handlers (``env://``, ...) by this object's."""
        for scheme in _SCHEMES:
            _rendezvous_handlers[scheme] = self._handler(_rendezvous_handlers[scheme])
        in_torch: Callable[..., Any] = vars(dist)["_create_store_from_options"]

        def create_store(options: Any, rank: int) -> Any:
            self._is_open = True
            try:
                return in_torch(options, rank)
            finally:
                self._is_open = False

        ProgramsTCPStore.waits = self._store.waits
        vars(dist)["TCPStore"] = ProgramsTCPStore
        # Of RPC whose workers may join and leave.
        vars(dist)["_create_store_from_options"] = create_store

    def _handler(self, in_torch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def handle(
            url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any
        ) -> Iterator[Any]:
            call = read_call(url)
            if self._is_open:
                call = replace(call, size=-1)
            known = call.address is not None and call.rank is not None and call.size is not None
            if os.getpid() != self._pid or not known:  # torch says what is missing
                yield from in_torch(url, timeout=timeout, **kwargs)
                return
            if not self.for_group:
                rpc.refuse_if_running()  # before the store that the running RPC uses is forgotten
            session = self._meet(call, timeout)
            if self.for_group:
                self.session = session
            else:
                self._forget(self._remote_session)
                self._remote_session = session  # C++ holds no reference that Python counts
                rpc.begin(session.number)
            yield session.store, call.rank, call.size
            raise RuntimeError("Unable to perform rerendezvous")  # as torch's handlers

        return handle

    def _meet(self, call: Call, timeout: timedelta) -> Session:
        """Wait until every rank has made this call; return what the ranks agreed on."""
        address, rank, size = call.address, call.rank, call.size
        assert address is not None
        assert rank is not None
        assert size is not None
        place = f"{self._prefix}/{self._generation:x}/{address}"
        if size < 0:  # RPC whose workers may join and leave
            number = self._num_open[address] = self._num_open.get(address, 0) + 1
            return self._begin(number, (), f"{place}/open")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of world_size {size}: ranks count from 0 to {size - 1}")
        if size > self.world_size:
            raise ValueError(
                f"world_size is {size}, but the mesh has {self.world_size} ranks: give world_size="
                f"{self.world_size} or less, or start {size} ranks (%dist_start {size})"
            )
        return self._join(f"{place}/{size}", call, _seconds(timeout))

    def _join(self, place: str, call: Call, limit_s: float) -> Session:
        store, rank, size = self._store, call.rank or 0, call.size or 1
        keys = [f"{place}/{other}" for other in range(size)]
        own = _Join(self._rank, uuid.uuid4().hex, self._last_number)
        value = msgspec.msgpack.encode(own)
        held = store.compare_set(keys[rank], "", value)
        if held != value:
            other = msgspec.msgpack.decode(held, type=_Join).mesh_rank
            if other != self._rank:
                raise ValueError(
                    f"ranks {other} and {self._rank} of the mesh both ask to be rank {rank} of "
                    f"{size} at {call.address}: give each group a MASTER_PORT or an init_method "
                    "of its own"
                )
            store.set(keys[rank], value)  # left behind by an earlier call of this rank
        self._awaited = (place, size)
        go_key = f"{place}/go/{own.token}"
        awaited = keys if rank == 0 else [go_key]
        try:
            store.waits.until(
                lambda: store.check(awaited),
                limit_s,
                f"the other ranks of {size} at {call.address}",
            )
            if rank == 0:
                self._let_go(keys, f"{place}/go")
            go = msgspec.msgpack.decode(store.get(go_key), type=_Go)
            store.delete_key(go_key)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store's process may have died
                store.delete_key(keys[rank])
            raise
        finally:
            self._awaited = None
        self._last_number = go.number
        return self._begin(go.number, go.members, go.prefix)

    def _let_go(self, keys: list[str], place: str) -> None:
        joins = [msgspec.msgpack.decode(data, type=_Join) for data in self._store.multi_get(keys)]
        go = _Go(
            1 + max(join.last_number for join in joins),
            tuple(join.mesh_rank for join in joins),
            f"{self._prefix}/{joins[0].token}",
        )
        self._store.forget_keys(keys)
        for join in joins:
            self._store.set(f"{place}/{join.token}", msgspec.msgpack.encode(go))

    def _begin(self, number: int, members: tuple[int, ...], prefix: str) -> Session:
        keys: list[str] = []
        kind = InterruptibleStore if self.for_group else rpc.RemoteCallsStore
        store = kind(PrefixStore(prefix, self._store), self._store.waits)
        store.note_keys(keys)
        return Session(number, members, store, keys)

    def meet_over(self, store: Any, rank: int, size: int, timeout: timedelta) -> Session:
        """Agree with the other ranks of a call that passes its own store."""
        given = InterruptibleStore(store, self._store.waits)
        own = _Join(self._rank, "", self._last_number)
        num_calls = given.add(f"cellmesh/{size}/{rank}", 1)  # a program may use its store again
        keys = [f"cellmesh/{size}/{num_calls}/{other}" for other in range(size)]
        given.set(keys[rank], msgspec.msgpack.encode(own))
        given.wait(keys, timedelta(seconds=_seconds(timeout)))
        joins = [msgspec.msgpack.decode(given.get(key), type=_Join) for key in keys]
        self._last_number = 1 + max(join.last_number for join in joins)
        return Session(self._last_number, tuple(join.mesh_rank for join in joins), given, [])

    def end_session(self) -> None:
        """Note that the program's process group, which ranks had agreed on, was destroyed."""
        self._forget(self.session)
        self.session = None

    def _forget(self, session: Session | None) -> None:
        if session is not None:
            session.store.forget_keys(session.keys)

    def missing(self) -> str:
        """Return which ranks of a call this rank waits for, in words; on any thread."""
        awaited = self._awaited
        if awaited is None:
            return ""
        place, size = awaited
        try:
            missing = [
                str(rank) for rank in range(size) if not self._store.check([f"{place}/{rank}"])
            ]
        except RuntimeError:  # the store's process has just died
            return ""
        return (
            f"for rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {size}" if missing else ""
        )


def _seconds(timeout: timedelta) -> float:
    """Return a call's time-out in seconds; torch's default counts as no time-out."""
    return _YEAR_S if timeout == default_pg_timeout else timeout.total_seconds()


class Presence(msgspec.Struct, frozen=True):
    """The state (groups, models, counters) that a rank sends to others at the start of a heal."""

    groups: tuple[GroupPlan, ...]  # that it is a member of
    group_count: int  # torch's counter of the mesh's groups
    # Signatures of the models that an interrupted step has left half done.
    half_done: tuple[str, ...]
    # How far the models have got in what is done once, or counted, by signature.
    progress: dict[str, Progress]
    uses_meshs: bool = True  # not set aside
    # torch's counter of the groups of a program, by the name of its default group.
    program: dict[str, int] = {}
    lack: str = ""  # why it cannot connect its groups; "" if it can


class Meeting:
    """The exchange of data through the mesh's store between the ranks that take part in a heal:
    their states, and which models to reset.
    """

    def __init__(
        self, store: MeshStore, prefix: str, rank: int, participants: frozenset[int]
    ) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._participants = sorted(participants)
        self.keys: list[str] = []  # that this rank has set in the store
        self.present: dict[int, Presence] = {}  # by rank, once they are exchanged

    def exchange_presence(self, ours: Presence) -> None:
        """Exchange the states that ranks report at the start of a heal; raise `GroupDown` if one
        does not answer or cannot connect its groups.
        """
        received = self.exchange("present", msgspec.msgpack.encode(ours))
        self.present = {
            rank: msgspec.msgpack.decode(data, type=Presence) for rank, data in received.items()
        }
        lacks = [f"rank {rank}: {other.lack}" for rank, other in self.present.items() if other.lack]
        if lacks:
            raise GroupDown(
                f"healing the process groups was given up. {'; '.join(lacks)}. Then %dist_heal"
            )

    def exchange(self, topic: str, ours: bytes) -> dict[int, bytes]:
        """Send a value to all ranks that take part in the heal, and return theirs by rank; raise
        `GroupDown` if one does not take part.
        """
        keys = {rank: f"{self._prefix}/{topic}/{rank}" for rank in self._participants}
        self.keys.append(keys[self._rank])
        self._store.set(keys[self._rank], ours)
        try:
            self._store.wait(list(keys.values()), _HEAL_PATIENCE)
        except DistStoreError as error:
            missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
            raise GroupDown(
                f"healing the process groups was given up: rank {', '.join(missing)} did not take "
                "part. %dist_heal tries again"
            ) from error
        return dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))

    def why_not(self, plan: GroupPlan, world_size: int) -> str:
        """Return why a process group of this rank cannot be connected now; "" if it can."""
        members = plan.members(world_size)
        missing = [rank for rank in members if rank not in self.present]
        if missing:
            return f"{_ranks(missing)} missing"
        if not plan.ranks:
            return ""  # ranks that had destroyed the default group have made it again
        wanted = (plan.name, plan.ranks)
        without = [
            rank
            for rank in members
            if all(wanted != (other.name, other.ranks) for other in self.present[rank].groups)
        ]
        return f"{_ranks(without)} without it" if without else ""

    def reset(self, models: Survey) -> tuple[str, ...]:
        """Reset models to a state between two steps, alike on all ranks; return user notes."""
        progress: dict[str, set[Progress]] = {}
        for other in self.present.values():
            for signature, found in other.progress.items():
                progress.setdefault(signature, set()).add(found)
        differing = {
            signature: sorted(found) for signature, found in progress.items() if len(found) > 1
        }
        if unsettled := with_unsettled_buckets(differing):
            orders: dict[str, set[tuple[str, ...]]] = {}
            ours = msgspec.msgpack.encode(models.finish_buckets(unsettled))
            for received in self.exchange("buckets", ours).values():
                theirs = msgspec.msgpack.decode(received, type=dict[str, tuple[str, ...]])
                for signature, digests in theirs.items():
                    orders.setdefault(signature, set()).add(digests)
            models.restart_buckets(
                {signature for signature, found in orders.items() if len(found) > 1}
            )
        half_done = {name for other in self.present.values() for name in other.half_done}
        return models.reset(half_done, differing)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
