"""Lets ranks find each other when user programs call ``init_process_group`` or ``init_rpc`` on
them.

Under torchrun every process is a client of one store, and no process serves an address that a
program names itself; in a plain script, rank 0 of the call serves it. Here an address (``env://``
with MASTER_ADDR and MASTER_PORT, ``tcp://``, ``file://``, a store's) is only a name: ranks that
call with the same address meet over the mesh's store, each time under new keys. So no key of an
earlier run of a cell is read, no port has to be free, and the first stop ends a wait for ranks that
have not called yet.

A process that a rank has forked or spawned is not part of the mesh, and uses torch's own methods.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from . import rpc
from .store import InterruptibleStore, MeshStore, ProgramsTCPStore

_SCHEMES = ("env", "tcp", "file")
_YEAR_S = 365 * 86400.0


@dataclass(frozen=True)
class Agreement:
    """The result of one ``init_process_group`` or ``init_rpc`` call, on which its ranks have
    agreed: a number, the mesh ranks of the members, and a store.
    """

    number: int  # greater than the numbers of all earlier agreements of the members
    members: tuple[int, ...]  # mesh rank of each rank of the call
    store: InterruptibleStore  # used by the members alone


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
    """The entry in the mesh's store from which a rank learns that every rank of its call has
    called.
    """

    number: int
    members: tuple[int, ...]
    prefix: str


def read_call(url: str, rank: int = -1, size: int = -1) -> Call:
    """Return the `Call` that an ``init_method``, the arguments `rank` and `size` and, for
    ``env://``, the environment specify.
    """
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


class ProgramCalls:
    """Finds the ranks that make the same ``init_process_group`` or ``init_rpc`` call as this rank,
    through the mesh's store.

    Args:
        store: store of the mesh.
        prefix: prefix of this incarnation's keys in the store.
        rank, world_size: this rank's number and the number of ranks of the mesh.

    Attributes:
        for_group: whether the call is of ``init_process_group``; else it is of ``init_rpc``.
        of_group: last agreement for a process group; None once that group is destroyed.
    """

    def __init__(self, store: MeshStore, prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self.world_size = store, prefix, rank, world_size
        self._pid = os.getpid()
        self._last_number = 0
        self._of_rpc: Agreement | None = None
        self._generation = 0
        self.for_group = False
        self.of_group: Agreement | None = None

    def begin_generation(self, generation: int) -> None:
        """Use other keys in the mesh's store from now on, so that no rank reads entries from before
        a heal.
        """
        self._generation = generation

    def install(self) -> None:
        """Replace torch's rendezvous handlers (``env://``, ...) by those of this object."""
        for scheme in _SCHEMES:
            _rendezvous_handlers[scheme] = self._handler(_rendezvous_handlers[scheme])
        ProgramsTCPStore.waits = self._store.waits
        vars(dist)["TCPStore"] = ProgramsTCPStore

    def _handler(self, in_torch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def handle(
            url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any
        ) -> Iterator[Any]:
            call = read_call(url)
            if call.size == -1:  # of `init_rpc` without `world_size`
                call = replace(call, size=self.world_size)
            known = call.address is not None and call.rank is not None and call.size is not None
            if os.getpid() != self._pid or not known:  # torch reports a missing value
                yield from in_torch(url, timeout=timeout, **kwargs)
                return
            if not self.for_group:
                rpc.refuse_if_running()  # before the keys of the running RPC are deleted
            agreed = self.meet(call, timeout)
            if not self.for_group:
                if self._of_rpc is not None:
                    self._of_rpc.store.forget_keys()
                self._of_rpc = agreed  # keeps the store: C++ has no Python reference
                rpc.begin(agreed.number)
            yield agreed.store, call.rank, call.size
            raise RuntimeError("Unable to perform rerendezvous")  # as torch's handlers do

        return handle

    def meet(self, call: Call, timeout: timedelta) -> Agreement:
        """Wait until every rank of `call` has made the call, and return their `Agreement`; `call`
        has an address, a rank and a size.
        """
        rank, size = call.rank or 0, call.size or 0
        place = f"{self._prefix}/{self._generation:x}/{call.address}/{size}"
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of world_size {size}: ranks count from 0 to {size - 1}")
        if size > self.world_size:
            raise ValueError(
                f"world_size is {size}, but the mesh has {self.world_size} ranks: give world_size="
                f"{self.world_size} or less, or start {size} ranks (%dist_start {size})"
            )
        agreed = self._join(place, call, _seconds(timeout))
        if self.for_group:
            self.of_group = agreed
        return agreed

    def _join(self, place: str, call: Call, limit_s: float) -> Agreement:
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
            store.set(keys[rank], value)  # replaces an entry of an earlier call of this rank
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
            with contextlib.suppress(RuntimeError):  # the store's process may be dead
                store.delete_key(keys[rank])
            raise
        self._last_number = go.number
        kind = InterruptibleStore if self.for_group else rpc.RemoteCallsStore
        its_store = kind(PrefixStore(go.prefix, store), store.waits)
        its_store.note_keys()
        return Agreement(go.number, go.members, its_store)

    def _let_go(self, keys: list[str], place: str) -> None:
        joins = [msgspec.msgpack.decode(data, type=_Join) for data in self._store.multi_get(keys)]
        go = _Go(
            1 + max(join.last_number for join in joins),
            tuple(join.mesh_rank for join in joins),
            f"{self._prefix}/{joins[0].token}",
        )
        for key in keys:
            self._store.delete_key(key)
        for join in joins:
            self._store.set(f"{place}/{join.token}", msgspec.msgpack.encode(go))

    def forget_group(self) -> None:
        """Record that the program's default process group was destroyed, and delete the keys of its
        store.
        """
        agreed, self.of_group = self.of_group, None
        if agreed is not None:
            agreed.store.forget_keys()


def _seconds(timeout: timedelta) -> float:
    """Return a call's time-out in seconds; torch's default counts as no time-out."""
    return _YEAR_S if timeout == default_pg_timeout else timeout.total_seconds()
