"""Every kind of wait is ended by `Groups.release`, and the groups work again after a heal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

from tests.mesh.forked import Rank, World, released_after
from tests.mesh.models import Models

ALL = frozenset(range(4))


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
        for kind in ("ddp", "fsdp", "tp", "dtensor", "pipeline"):
            models.step(kind, 2)
        return done

    with World(4, {"dp": 2, "tp": 2}) as world:
        assert len(set(map(tuple, world.run(try_all)))) == 1


def test_compiled_functions_give_the_same_before_and_after_a_release() -> None:
    def compare(rank: Rank) -> Any:
        @torch.compile(backend="aot_eager", fullgraph=True)
        def reduce(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

        @torch.compile(backend="aot_eager")
        def in_place(x: torch.Tensor) -> torch.Tensor:
            x = x * 3
            dist.all_reduce(x)
            return x + 1

        one = torch.arange(4.0) + rank.rank
        before = [function(one).tolist() for function in (reduce, in_place)]
        for generation, function in enumerate((reduce, in_place), 1):
            if rank.rank == 0:
                with released_after(rank.groups, 0.05), pytest.raises(RuntimeError):
                    function(one).sum().item()
                assert rank.groups.is_broken
            rank.groups.heal(generation, frozenset(range(2)))
            assert [function(one).tolist() for function in (reduce, in_place)] == before
        return before

    with World(2) as world:
        first, second = world.run(compare)
        assert first == second == [[3.0, 7.0, 11.0, 15.0], [4.0, 10.0, 16.0, 22.0]]


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


def test_the_loss_of_a_peer_is_noticed_and_stays_known_after_a_release() -> None:
    def look(rank: Rank) -> None:
        assert not rank.groups.is_broken
        rank.tell("ready")
        if rank.rank == 1:
            rank.listen()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        assert rank.groups.is_broken
        rank.groups.release()  # gloo has closed what it would cut
        assert rank.groups.is_broken

    with World(2) as world:
        world.start(look)
        assert world.hear(1) == "ready"
        world.kill(1)
        world.results(of={0})
