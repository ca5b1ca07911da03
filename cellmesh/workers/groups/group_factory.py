"""Lets torch make process groups, and records their connections and the data to make them again."""

from __future__ import annotations

import contextlib
import inspect
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ...errors import GroupDown
from ...stdlib import os, time
from . import connections
from .any_backend import GlooGroups, patient_constructors
from .store import MeshStore
from .waits import Waits

# A cell may take any time: torch's default time-out (30 min) would destroy the group of a user who
# sits in a debugger. A hanging collective is reported and can be interrupted instead.
TIMEOUT = timedelta(days=365)
# Descriptors of each group, besides a connection per member: gloo's listening socket, its event
# loop's and its rendezvous's.
A_GROUP = 8
# Descriptors for Python itself, and for files that user threads open while groups connect.
_SPARE = 16
# Variables of gloo that are "1" while ranks connect a group: it numbers connections by ranks, so
# that a member's address holds no number for each other member, and reads addresses from the store
# in requests of 128 keys (256 ranks would send 200,000 requests). Processes outside the mesh, with
# which a program may make gloo groups itself, number connections in gloo's usual way. Ranks have
# both variables from the start: C code may read the environment while one gets another value, but
# not while one is added.
GLOO_SWITCHES = "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_ENABLE_STORE_V2_API"
# How long to wait for free descriptors: retired groups are closed in the background.
_PATIENCE_S, _LOOK_S = 1.0, 0.02


@dataclass(frozen=True)
class Transport:
    """The connections of a process group, and the gloo groups that use them."""

    sockets: dict[int, int] = field(default_factory=dict)
    gloo: Sequence[ProcessGroupGloo] = ()


# Read before the fork, as reading it takes a rank 0.6 ms and 0.6 MB.
_SIGNATURE = inspect.signature(c10d._new_process_group_helper)
# The arguments of ``_new_process_group_helper`` by name; its results, with the new transport.
Asked = dict[str, Any]
Made = tuple[Any, Any, Transport]


@dataclass(frozen=True)
class Placement:
    """A rank's torch device, and the backend string that it gives to ``init_process_group``."""

    device: torch.device
    backend: str


def choose_placement(
    backend: str, local_rank: int, num_local_ranks: int, num_gpus: int
) -> Placement:
    """Choose a rank's device, and the backend string for the mesh's `backend`.

    ``auto`` means NCCL for CUDA tensors if every rank of the host has a GPU of its own, else gloo.

    Args:
        backend: "auto", "gloo" or "nccl".
        local_rank: number of the rank on its host.
        num_local_ranks: number of ranks on the host.
        num_gpus: number of GPUs of the host.
    """
    if num_gpus == 0:
        return Placement(torch.device("cpu"), "gloo")
    device = torch.device("cuda", local_rank % num_gpus)
    if backend == "gloo" or (backend == "auto" and num_local_ranks > num_gpus):
        return Placement(device, "cpu:gloo,cuda:gloo")
    return Placement(device, "cpu:gloo,cuda:nccl")


class GroupPlan(msgspec.Struct, frozen=True):
    """The data to make a process group again: name, ranks, backend, time-out."""

    name: str
    # The mesh's ranks that are its members, in the group's order; () for the default group.
    ranks: tuple[int, ...]
    backend: str
    tag: str  # "" for none
    description: str
    timeout_s: float

    def members(self, world_size: int) -> tuple[int, ...]:
        """Return the global ranks of the group's members."""
        return self.ranks or tuple(range(world_size))


class MeshPlan(msgspec.Struct, frozen=True):
    """The data to make a rank's DeviceMesh over all ranks again."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    # torch's counter of groups when it was made, from which its groups are named.
    first_group: int


class BlueprintData(msgspec.Struct, frozen=True):
    """The data from which a new rank makes the same process groups as a living rank."""

    # In the order of creation, including groups of which the writer is no member.
    groups: tuple[GroupPlan, ...]
    group_count: int
    mesh: MeshPlan | None = None


class Maker:
    """Makes process groups by torch's ``_new_process_group_helper``, in such a way that signals and
    `Waits.end` end the wait for other ranks.

    The mesh's store is connected first, so that its connection is not taken for the group's.
    """

    def __init__(self, store: MeshStore, waits: Waits) -> None:
        self._store, self._waits = store, waits
        self.own_gloo = GlooGroups(waits)
        self._helper: Callable[..., Any] = c10d._new_process_group_helper

    def intercept(self, new_group: Callable[[Asked], Any]) -> None:
        """Redirect this process's calls of ``_new_process_group_helper`` to `new_group`."""
        self.own_gloo.install()
        pid = os.getpid()

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != pid:  # a process that user code has forked
                return self._helper(*args, **kwargs)
            call = _SIGNATURE.bind(*args, **kwargs)
            call.apply_defaults()
            return new_group(call.arguments)

        c10d._new_process_group_helper = make_watched

    def make(
        self, asked: Asked, limit_s: float | None = None, store: MeshStore | None = None
    ) -> Made:
        """Make a process group (``NON_GROUP_MEMBER`` if this rank is not in it), and return it with
        its c10d store and its connections.

        Args:
            asked: arguments of ``_new_process_group_helper``.
            limit_s: how long ranks may take to connect, in seconds; None for no limit.
            store: the store of its members, if that is not the mesh's.
        """
        # gloo's messages keep the time-out that gloo connects with.
        arguments = asked | {"timeout": _timeout_for(asked)}
        fill_standard_descriptors()
        (store or self._store).connect()
        is_member = asked["group_rank"] is not None
        if is_member and (lack := find_lack([asked["group_size"]])):
            raise GroupDown(
                f"the process group {str(asked['group_name'])!r} cannot be connected: {lack}"
            )
        before = connections.open_sockets()
        try:
            with (
                self.own_gloo.noting(limit_s) as gloo,
                patient_constructors(self._waits, limit_s),
                _few_requests(arguments["timeout"]),
            ):
                made, its_store = self._helper(**arguments)
            return (
                made,
                its_store,
                Transport(connections.connected(connections.new_sockets(before)), gloo),
            )
        except BaseException:
            connections.shut_down(connections.new_sockets(before))
            raise


@contextlib.contextmanager
def _few_requests(timeout: timedelta) -> Iterator[None]:
    """Enter a context in which gloo connects a group with few requests to the store."""
    # Requests of many keys ignore the group's time-out.
    names = GLOO_SWITCHES if timeout == TIMEOUT else GLOO_SWITCHES[:1]
    for name in names:
        os.putenv(name, "1")
    try:
        yield
    finally:
        for name in names:
            os.putenv(name, os.environ.get(name, "0"))


def _timeout_for(asked: Asked) -> timedelta:
    """Return the time-out that the user chose for a process group; `TIMEOUT` if it is torch's
    default.
    """
    timeout: timedelta | None = asked["timeout"]
    if asked["backend_options"] is not None and timeout is not None:
        return timeout  # torch compares it with the options' time-out
    by_default = timeout is None or timeout in (default_pg_timeout, default_pg_nccl_timeout)
    return TIMEOUT if by_default or timeout is None else timeout


def plan_of(asked: Asked, ranks: tuple[int, ...]) -> GroupPlan:
    """Return the `GroupPlan` of the group that a call of ``_new_process_group_helper`` makes."""
    return GroupPlan(
        str(asked["group_name"]),
        ranks,
        str(asked["backend"]),
        asked["pg_tag"] or "",
        asked["group_desc"] or "undefined",
        _timeout_for(asked).total_seconds(),
    )


def call_for(plan: GroupPlan, rank: int, store: Any) -> Asked:
    """Return the arguments of ``_new_process_group_helper`` that make the group of a `GroupPlan` on
    `rank`.
    """
    return {
        "group_size": len(plan.ranks),
        "group_rank": plan.ranks.index(rank) if rank in plan.ranks else None,
        "global_ranks_in_group": list(plan.ranks),
        "backend": plan.backend,
        "store": store,
        "group_name": plan.name,
        "backend_options": None,
        "timeout": timedelta(seconds=plan.timeout_s),
        "pg_tag": plan.tag,
        "device_id": None,
        "group_desc": plan.description,
    }


def fill_standard_descriptors() -> None:
    """Open /dev/null in place of descriptors 0, 1 and 2 if user code has closed them.

    Otherwise a group's sockets would take these numbers: output of C code and subprocesses would be
    sent to another rank, in the middle of a collective, and a subprocess would read from there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)


def find_lack(sizes: Iterable[int], num_coming: int = 0) -> str:
    """Return why this rank has too few file descriptors to connect groups; "" if it has enough.

    The check precedes connecting, as gloo aborts the process when descriptors run out.

    Args:
        sizes: number of members of each group.
        num_coming: number of descriptors that are about to be closed.
    """
    needed = _SPARE + sum(A_GROUP + size for size in sizes)
    deadline = time.monotonic() + _PATIENCE_S
    while (num_free := count_free() + num_coming) < needed:
        if time.monotonic() > deadline:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"{max(0, num_free)} of {limit} descriptors are free, and connecting process "
                f"groups needs {needed}: close files and sockets there, or start the mesh under a "
                "higher `ulimit -n`"
            )
        time.sleep(_LOOK_S)
    return ""


def count_free() -> int:
    """Return how many file descriptors this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        return limit - sum(int(entry) < limit for entry in os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is left to list them
        return 0
