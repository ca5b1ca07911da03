"""The rank's process group: made, shaped into a DeviceMesh, and freed when a collective must end.

``ProcessGroupGloo.abort()`` frees nobody in torch 2.13, so a blocked gloo collective is freed by shutting
down its connected sockets; they are told from others by having appeared while a group was made. The
listening sockets are left alone: gloo ends the process when they go.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .processes import renew_resolver

# A cell may take as long as it takes: torch's own time-out (30 min) would take the group away from a user
# who sits in a debugger. What hangs is shown and interrupted, not timed out.
_TIMEOUT = timedelta(days=365)
_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Placement:
    """Where a rank computes: its device, and the backend string for ``init_process_group``."""

    device: torch.device
    backend: str


def choose_placement(backend: str, local_rank: int, num_local_ranks: int, num_gpus: int) -> Placement:
    """Choose device and backend of a rank.

    Args:
        backend: ``auto``, ``gloo`` or ``nccl``.
        local_rank: rank on its host.
        num_local_ranks: ranks on its host.
        num_gpus: GPUs on its host.

    Returns:
        With ``auto``: NCCL for CUDA tensors where every rank has a GPU of its own, else gloo for all.
    """
    if num_gpus == 0:
        return Placement(torch.device("cpu"), "gloo")
    device = torch.device("cuda", local_rank % num_gpus)
    if backend == "gloo" or (backend == "auto" and num_local_ranks > num_gpus):
        return Placement(device, "cpu:gloo,cuda:gloo")
    return Placement(device, "cpu:gloo,cuda:nccl")


class Groups:
    """The process groups of this rank.

    Args:
        rank: global rank.
        world_size: number of ranks.
        placement: device and backend.
        store_port: port of the c10d store on MASTER_ADDR.
        incarnation: counts the starts and restarts of the mesh; keys of different ones do not mix.
    """

    def __init__(
        self, rank: int, world_size: int, placement: Placement, store_port: int, incarnation: int
    ) -> None:
        self.rank, self.world_size, self.placement = rank, world_size, placement
        self._port = store_port
        self._incarnation = incarnation
        self._num_stores = 0
        self._sockets: dict[int, int] = {}  # descriptor -> inode

    def initialize(self) -> None:
        """Make the default process group. Every rank must call it; blocks until all have."""
        self._watch("_new_process_group_helper")
        if self.placement.device.type == "cuda":
            torch.cuda.set_device(self.placement.device)
        dist.init_process_group(
            self.placement.backend,
            store=self._new_store(),
            rank=self.rank,
            world_size=self.world_size,
            timeout=_TIMEOUT,
        )
        self._adopt_init_process_group()

    def build_mesh(self, names: Sequence[str], shape: Sequence[int]) -> DeviceMesh:
        """Make a DeviceMesh over all ranks. Every rank must call it; blocks."""
        return init_device_mesh(self.placement.device.type, tuple(shape), mesh_dim_names=tuple(names))

    def release(self) -> int:
        """Make blocked gloo collectives of this process raise; callable from any thread.

        The groups are of no use afterwards.

        Returns:
            How many connections were shut down.
        """
        num_closed = 0
        for descriptor, inode in list(self._sockets.items()):
            try:
                if os.fstat(descriptor).st_ino != inode:  # closed, and the number used again
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
                        num_closed += 1
            except OSError:
                continue
        self._sockets.clear()
        return num_closed

    def _watch(self, maker: str) -> None:
        """Note the sockets that appear while torch makes a group."""
        make: Callable[..., Any] = getattr(c10d, maker)

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            before = _open_sockets()
            try:
                return make(*args, **kwargs)
            finally:
                self._sockets.update(
                    {fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode}
                )

        setattr(c10d, maker, make_watched)

    def _adopt_init_process_group(self) -> None:
        """Let a torchrun script's ``dist.init_process_group`` find the mesh's group instead of failing.

        After the script's ``destroy_process_group`` a further call makes a new group over the mesh's store.
        """
        init = dist.init_process_group

        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
            if not dist.is_initialized():
                self._initialize_again(init, backend, *args, **kwargs)
                return
            wanted = kwargs.get("backend", backend)
            if wanted is not None and str(wanted) not in (
                self.placement.backend,
                *self.placement.backend.replace("cpu:", "").replace("cuda:", "").split(","),
            ):
                raise ValueError(
                    f"the mesh's process group is {self.placement.backend!r}, not {wanted!r}: call "
                    f"dist.destroy_process_group() first, or %dist_stop and start with --backend {wanted}"
                )

        init_process_group.__doc__ = init.__doc__
        dist.init_process_group = init_process_group
        c10d.init_process_group = init_process_group

    def _initialize_again(
        self, init: Callable[..., None], backend: str | None, *args: Any, **kwargs: Any
    ) -> None:
        """What a script asks for after its `destroy_process_group`; ``env://`` means the mesh's store."""
        method = args[0] if args else kwargs.get("init_method")
        if kwargs.get("store") is None and method in (None, "env://"):
            args = ()
            kwargs.update(
                init_method=None, store=self._new_store(), rank=self.rank, world_size=self.world_size
            )
            kwargs.setdefault("timeout", _TIMEOUT)
        if backend is None and kwargs.get("backend") is None:
            kwargs["backend"] = self.placement.backend
        elif backend is not None:
            kwargs["backend"] = backend
        init(*args, **kwargs)

    def _new_store(self) -> PrefixStore:
        """The mesh's store, under a prefix that no earlier group has used: stale addresses are not met."""
        self._num_stores += 1
        host = os.environ["MASTER_ADDR"]
        with _no_name_lookups():
            store = TCPStore(host, self._port, None, is_master=False, timeout=_STORE_TIMEOUT)
        return PrefixStore(f"cellmesh/{self._incarnation}.{self._num_stores}", store)


@contextlib.contextmanager
def _no_name_lookups() -> Iterator[None]:
    """Let the resolver give up at once, on this thread.

    When it connects, torch looks up the name of ``::ffff:127.0.0.1`` for its log, which no hosts file has: a
    DNS query for each rank. Sixty-four at once lose packets and wait 5 s for them; without an answering
    server, eight do.
    """
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = "attempts:0"
    renew_resolver()
    try:
        yield
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before
        renew_resolver()


def _open_sockets() -> dict[int, int]:
    """The TCP sockets of this process: descriptor -> inode."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                descriptor = int(entry)
                with socket.socket(fileno=os.dup(descriptor)) as candidate:
                    if candidate.family in (socket.AF_INET, socket.AF_INET6):
                        found[descriptor] = os.fstat(descriptor).st_ino
        except OSError:
            continue
    return found
