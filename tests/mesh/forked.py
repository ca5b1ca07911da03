"""Ranks without an agent: plain processes that build `Groups` over a store of the test's own."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cellmesh.workers.groups.group_factory import choose_placement
from cellmesh.workers.groups.groups import Groups

TIMEOUT_S = 60.0
_fork = multiprocessing.get_context("fork")


@dataclass
class Rank:
    """What a scenario gets: its rank, its groups, its mesh, and a way to talk with the test."""

    rank: int
    world_size: int
    groups: Groups
    mesh: Any
    pipe: Connection

    def tell(self, what: Any) -> None:
        """Say something to the test (`World.hear`)."""
        self.pipe.send(("said", what))

    def listen(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait for what the test says (`World.tell`)."""
        if not self.pipe.poll(timeout_s):
            raise TimeoutError("the test says nothing")
        return self.pipe.recv()


Scenario = Callable[[Rank], Any]


class World:
    """Ranks that run a scenario each, over torch's own groups if `plain`; a context manager."""

    def __init__(
        self,
        world_size: int,
        mesh: dict[str, int] | None = None,
        plain: bool = False,
        num_gpus: int = 0,
    ) -> None:
        self.plain, self.num_gpus = plain, num_gpus
        self.world_size = world_size
        self.dims = mesh or {"dp": world_size}
        self.processes: dict[int, BaseProcess] = {}
        self.pipes: dict[int, Connection] = {}
        self.port = 0
        self._stores: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> World:
        self.port = self.start_store()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self.processes.values(), *(store for store, _ in self._stores)]:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in [*self.pipes.values(), *(pipe for _, pipe in self._stores)]:
            pipe.close()

    def start_store(self) -> int:
        """A c10d store in a process of its own; returns its port."""
        ours, theirs = _fork.Pipe()
        process = _fork.Process(target=_serve_store, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._stores.append((process, ours))
        assert ours.poll(TIMEOUT_S)
        return int(ours.recv())

    def start(self, scenario: Scenario, *ranks: int, blueprint: bytes | None = None) -> None:
        """Fork ranks (all, unless named); with a blueprint they rejoin."""
        for rank in ranks or range(self.world_size):
            if rank in self.pipes:
                self.pipes.pop(rank).close()
            ours, theirs = _fork.Pipe()
            process = _fork.Process(
                target=_run_rank, args=(self, rank, scenario, theirs, blueprint)
            )
            process.start()
            theirs.close()
            self.processes[rank], self.pipes[rank] = process, ours

    def run(self, scenario: Scenario, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run a scenario on all ranks; returns its values by rank."""
        self.start(scenario)
        return self.results(timeout_s)

    def results(self, timeout_s: float = TIMEOUT_S, of: set[int] | None = None) -> list[Any]:
        """The values of the scenario, by rank; fails with the first rank's traceback."""
        wanted = set(range(self.world_size)) if of is None else of
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while set(values) != wanted:
            open_pipes = {self.pipes[rank]: rank for rank in wanted - set(values)}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer from ranks {sorted(open_pipes.values())} in {timeout_s} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                kind, value = _receive(pipe, rank)
                assert kind != "raised", f"rank {rank}:\n{value}"
                if kind == "returned":
                    values[rank] = value
        return [values[rank] for rank in sorted(wanted)]

    def tell(self, what: Any, *ranks: int) -> None:
        for rank in ranks or sorted(self.pipes):
            self.pipes[rank].send(what)

    def hear(self, rank: int, timeout_s: float = TIMEOUT_S) -> Any:
        """What a rank says next."""
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} says nothing"
        kind, value = _receive(self.pipes[rank], rank)
        assert kind == "said", f"rank {rank} {kind}:\n{value}"
        return value

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.processes[rank].join()


def _receive(pipe: Connection, rank: int) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        return "raised", f"rank {rank}'s process ended"
    return kind, value


def _serve_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


def _run_rank(
    world: World, rank: int, scenario: Scenario, pipe: Connection, blueprint: bytes | None
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world.world_size),
    )
    torch.set_num_threads(1)
    gc.freeze()  # as the zygote does: what was there before is not searched for models
    try:
        placement = choose_placement("auto", rank, world.world_size, world.num_gpus)
        groups = Groups(rank, world.world_size, placement, world.port, 0)
        names, shape = tuple(world.dims), tuple(world.dims.values())
        if world.plain:
            store = dist.TCPStore("127.0.0.1", world.port, None, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world.world_size)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        elif blueprint is None:
            groups.initialize()
            mesh = groups.build_mesh(names, shape)
        else:
            mesh = groups.rejoin(blueprint, names, shape)
        pipe.send(("returned", scenario(Rank(rank, world.world_size, groups, mesh, pipe))))
        os._exit(0)
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("raised", traceback.format_exc()))
        os._exit(1)


@contextlib.contextmanager
def released_after(groups: Groups, delay_s: float = 0.3) -> Iterator[None]:
    """Have another thread release the groups once the main thread waits in the body."""
    done = threading.Event()

    def release() -> None:
        while not done.wait(delay_s):
            groups.release()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
