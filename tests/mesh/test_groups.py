"""`Groups` on plain processes: waits are ended, and heals let the same objects go on."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

from cellmesh.errors import GroupDown
from cellmesh.workers.groups.group_factory import GLOO_SWITCHES, TIMEOUT
from cellmesh.workers.groups.store import MeshStore
from tests.mesh.forked import Rank, World, released_after
from tests.mesh.models import KINDS, Models

ALL = frozenset(range(4))
DIMS = {"dp": 2, "tp": 2}
NUM_HEALS = 100

# ---- the end of waits


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def _all_reduce_per_batch() -> None:
    for batch in DataLoader(_Numbers(), batch_size=2, num_workers=1):
        dist.all_reduce(batch)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _coalesced() -> None:
    ops = [dist.P2POp(dist.irecv, torch.zeros(1), 1 - dist.get_rank() % 2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _redistribute(rank: Rank) -> None:
    whole = distribute_tensor(torch.ones(8, 8), rank.mesh, [Shard(0), Shard(1)])
    whole.redistribute(rank.mesh, [Replicate(), Replicate()]).to_local().sum().item()
    dist.barrier()  # where those that needed nothing from the absent rank wait


@torch.compile(backend="aot_eager", fullgraph=True)
def _compiled(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def _waits(rank: Rank, models: Models) -> Iterator[tuple[str, Callable[[], object]]]:
    one = torch.ones(4)
    yield "all_reduce", lambda: dist.all_reduce(one)
    yield "all_gather", lambda: dist.all_gather([torch.zeros(4)] * 4, one)
    yield "broadcast", lambda: dist.broadcast(one, 3)
    yield "barrier", dist.barrier
    yield "monitored_barrier", dist.monitored_barrier
    yield "recv", lambda: dist.recv(one, 3)
    yield "recv from anyone", lambda: dist.recv(one)
    yield "async", lambda: _wait(dist.all_reduce(one, async_op=True))
    yield "irecv", lambda: _wait(dist.irecv(one, 3))
    yield "batched P2P", _coalesced
    yield "objects", lambda: dist.all_gather_object([None] * 4, "x")
    yield "compiled", lambda: _compiled(one).sum().item()
    yield "data loader", _all_reduce_per_batch
    yield "DTensor", lambda: _redistribute(rank)
    yield "FSDP2 forward", lambda: (models.loss("fsdp", 1), dist.barrier())
    for kind in ("ddp", "fsdp", "tp", "pipeline"):
        yield kind, lambda kind=kind: models.get_stuck(kind, 1)
    yield "new_group", lambda: dist.new_group([0, 1, 2, 3])
    yield "new_group of some", lambda: (dist.new_group([0, 3]), dist.barrier())
    yield "store", lambda: dist.distributed_c10d._get_default_store().wait(["never"])


def test_every_wait_is_ended_and_everything_works_again() -> None:
    def try_all(rank: Rank) -> list[str]:
        models, done = Models(rank), []
        assert _compiled(torch.ones(4)).tolist() == [9.0] * 4
        for generation, (name, wait) in enumerate(_waits(rank, models), 1):
            if rank.rank != 3:
                with released_after(rank.groups, 0.05), pytest.raises(RuntimeError):
                    wait()
                assert rank.groups.is_broken, name
            rank.groups.heal(generation, ALL)
            assert not rank.groups.is_broken, name
            total = torch.ones(1)
            for group in (None, rank.mesh.get_group("dp"), rank.mesh.get_group("tp")):
                dist.all_reduce(total, group=group)
            assert total.item() == 16, name
            # torch gives the new group one name on all ranks, also where only some ranks
            # have made a group before.
            group = dist.new_group([1, 3])
            if rank.rank in (1, 3):
                dist.all_reduce(total, group=group)
                assert total.item() == 32
            done.append(name)
        for kind in KINDS:
            models.step(kind, 2)
        assert _compiled(torch.ones(4)).tolist() == [9.0] * 4
        return done

    with World(4, DIMS) as world:
        assert len(set(map(tuple, world.run(try_all)))) == 1


def test_a_signal_gets_the_main_thread_out_of_the_making_of_a_group() -> None:
    def interrupt(rank: Rank) -> None:
        if rank.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                dist.new_group([0, 1])
            assert rank.groups.is_broken
            waits = [thread for thread in threading.enumerate() if thread.name == "cellmesh-wait"]
            for thread in waits:  # it is not left there for long
                thread.join(10)
                assert not thread.is_alive()
        rank.groups.heal(1, frozenset(range(2)))
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        assert total.item() == 2

    with World(2) as world:
        world.run(interrupt)


def test_the_requests_for_the_connections_of_a_group_do_not_grow_with_its_members() -> None:
    def count(rank: Rank) -> int:
        requests = []
        for name in ("get", "multi_get"):
            asks = getattr(MeshStore, name)
            setattr(MeshStore, name, lambda *args, asks=asks: (requests.append(1), asks(*args))[1])
        dist.new_group(timeout=TIMEOUT)
        return len(requests)

    for world_size in (2, 8):
        with World(world_size) as world:
            assert world.run(count) == [1] * world_size


def test_the_time_out_of_a_group_ends_the_wait_for_its_members() -> None:
    def make(rank: Rank) -> None:
        if rank.rank == 0:
            with pytest.raises(RuntimeError, match=r"wait timeout after 0\.1 s, keys: .*/1"):
                dist.new_group(timeout=timedelta(seconds=0.1))
            rank.tell("ended")
        rank.listen()

    with World(2) as world:
        world.start(make)
        assert world.hear(0) == "ended"
        world.tell("end")
        world.results()


def test_a_gloo_group_of_a_program_connects_to_processes_outside_the_mesh() -> None:
    def make(rank: Rank) -> None:
        group = rank.rank // 2
        if rank.rank % 2:  # a process that gloo's variables of the mesh do not reach
            for switch in GLOO_SWITCHES:
                os.putenv(switch, "0")
        dist.barrier()
        own = dist.ProcessGroupGloo(
            PrefixStore(f"own{group}", rank.groups._store), rank.rank % 2, 2
        )
        total = torch.ones(1)
        own.allreduce([total]).wait()
        assert total.item() == 2

    with World(4) as world:
        world.run(make)


# ---- heals


def _train(rank: Rank, num_steps: int, disturbed: bool) -> list[float]:
    """Step the models in turn; when disturbed, one rank does not come to a step before each."""
    models, losses = Models(rank), []
    for step in range(num_steps):
        kind, absent = KINDS[step % len(KINDS)], (step // len(KINDS)) % 4
        if disturbed:
            if rank.rank != absent:
                with released_after(rank.groups, 0.03), pytest.raises(RuntimeError):
                    models.get_stuck(kind, step)
            rank.groups.heal(step + 1, ALL)
        losses.append(models.step(kind, step))
    return losses


def test_a_hundred_heals_change_no_loss() -> None:
    losses = []
    for disturbed in (False, True):
        with World(4, DIMS) as world:
            train = functools.partial(_train, num_steps=NUM_HEALS, disturbed=disturbed)
            losses.append(world.run(train, 120))
    assert losses[0] == losses[1]


def test_heals_leak_nothing() -> None:
    def measure(rank: Rank) -> tuple[list[int], list[int]]:
        descriptors, threads = [], []
        for generation in range(1, 13):
            rank.groups.heal(generation, ALL)
            descriptors.append(len(os.listdir("/proc/self/fd")))
            threads.append(len(os.listdir("/proc/self/task")) - threading.active_count())
        return descriptors, threads

    with World(4, DIMS) as world:
        for descriptors, threads in world.run(measure):
            # What a connection holds goes a moment after it is closed: the most of each half is
            # compared.
            assert max(descriptors[-6:]) <= max(descriptors[:-6]), descriptors
            assert max(threads[-6:]) <= max(threads[:-6]), threads


def test_an_operation_that_is_waited_for_is_known_after_later_ones_have_ended() -> None:
    def wait(rank: Rank) -> None:
        groups, tp, dp = rank.groups, rank.mesh.get_group("tp"), rank.mesh.get_group("dp")
        assert groups.counts()[0].num_collectives == 0
        tensor = torch.ones(1)
        if rank.rank == 1:  # tp is (0, 1), dp is (0, 2)
            rank.listen()
        work = dist.all_reduce(tensor, group=tp, async_op=True)
        assert work is not None
        if rank.rank != 1:
            dist.all_reduce(torch.ones(1), group=dp)
        else:
            work.wait()
            dist.all_reduce(torch.ones(1), group=dp)
        if rank.rank == 0:
            operation = groups.ledger.current()
            assert operation is not None
            assert (operation.name, operation.group) == ("all_reduce", tp.group_name)
            rank.tell("looked")
        work.wait()
        assert groups.ledger.current() is None
        groups.ledger.mark()
        assert not groups.ledger.earlier  # it holds on to tensors
        dist.barrier()
        assert groups.counts()[0].num_collectives == 1
        groups.heal(1, ALL)
        assert {one.num_collectives for one in groups.counts()} == {0}

    with World(4, DIMS) as world:
        world.start(wait)
        assert world.hear(0) == "looked"
        world.tell("go")


# ---- new ranks


def _sum(group: dist.ProcessGroup | None = None) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def _check_groups(rank: Rank) -> list[str]:
    """Every group connects the right ranks, those made from now on, too; returns all names."""
    assert _sum() == 4
    assert _sum(rank.mesh.get_group("dp")) == _sum(rank.mesh.get_group("tp")) == 2
    if rank.rank in (1, 2):
        groups = dist.distributed_c10d._world.pg_names
        (mine,) = (one for one in groups if dist.get_process_group_ranks(one) == [1, 2])
        assert _sum(mine) == 2
        assert dist.get_backend(mine) == "gloo"
        assert mine.group_desc == "ours"
    made = dist.new_group([0, 2])
    if rank.rank in (0, 2):
        assert _sum(made) == 2
    return [one.name for one in rank.groups.counts()]


def _survive(rank: Rank) -> list[str]:
    dist.new_group([1, 2], group_desc="ours")
    dist.new_group([0, 3])
    dist.barrier()
    rank.tell(rank.groups.blueprint())
    rank.listen()
    rank.groups.heal(1, ALL)
    return _check_groups(rank)


def _come_anew(rank: Rank) -> list[str]:
    assert rank.mesh.mesh_dim_names == ("dp", "tp")
    with pytest.raises(GroupDown, match="dist_heal"):
        dist.barrier()
    rank.groups.heal(1, ALL)
    return _check_groups(rank)


@pytest.mark.parametrize("dead", [{0}, {1, 3}])
def test_new_ranks_take_the_place_of_dead_ones_in_every_group(dead: set[int]) -> None:
    with World(4, DIMS) as world:
        world.start(_survive)
        blueprints = [world.hear(rank) for rank in range(4)]
        for rank in dead:
            world.kill(rank)
        world.start(_come_anew, *dead, blueprint=blueprints[min(ALL - dead)])
        world.tell("go", *(ALL - dead))
        world.results()


def test_a_default_group_that_some_have_destroyed_is_there_again() -> None:
    def begin_anew(rank: Rank) -> None:
        if rank.rank == 0:
            dist.destroy_process_group()
        rank.groups.heal(1, frozenset({0, 1}))
        assert _sum() == 2
        num_sockets = []
        for _ in range(4):  # destroyed groups are let go of
            group = dist.new_group([0, 1])
            assert _sum(group) == 2
            dist.destroy_process_group(group)
            del group
            num_sockets.append(len(os.listdir("/proc/self/fd")))
        assert num_sockets[-1] <= num_sockets[0], num_sockets
        assert [one.name for one in rank.groups.counts()] == ["0"]
        for _ in range(2):
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            assert _sum() == 2
        dist.destroy_process_group()
        rank.groups.heal(2, frozenset({0, 1}))
        assert not dist.is_initialized()
        dist.init_process_group()
        assert _sum() == 2

    with World(2) as world:
        world.run(begin_anew)
