"""The same objects step on after heals, with the losses of an undisturbed run."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.mesh.forked import Rank, World, released_after
from tests.mesh.models import KINDS, Models

ALL = frozenset(range(4))
DIMS = {"dp": 2, "tp": 2}
NUM_HEALS = 100


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


def _check_losses(train: Callable[[Rank, bool], list[float]]) -> None:
    losses = []
    for disturbed in (False, True):
        with World(4, DIMS) as world:
            losses.append(world.run(functools.partial(train, disturbed=disturbed), 120))
    assert losses[0] == losses[1]


def test_a_hundred_heals_change_no_loss() -> None:
    _check_losses(functools.partial(_train, num_steps=NUM_HEALS))


@pytest.mark.parametrize("absent", [0, 3])
def test_a_rank_that_misses_the_second_forward_of_ddp_keeps_its_gradients_apart(
    absent: int,
) -> None:
    # Some ranks have put DDP's buckets in their final order by then, and others have not.
    def train(rank: Rank, disturbed: bool) -> list[float]:
        models = Models(rank)
        losses = [models.step("ddp", 0)]
        if disturbed:
            if rank.rank != absent:
                with released_after(rank.groups, 0.1), pytest.raises(RuntimeError):
                    models.get_stuck("ddp", 1)
            rank.groups.heal(1, ALL)
        return losses + [models.step("ddp", step) for step in range(1, 4)]

    _check_losses(train)


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


def test_counts_cover_operations_since_the_last_heal() -> None:
    def count(rank: Rank) -> None:
        groups = rank.groups
        dist.barrier()
        groups.ledger.mark()
        assert groups.ledger.counts_since_mark() == ()
        tensor = torch.ones(1)
        if rank.rank == 0:
            dist.send(tensor, 2)
        if rank.rank == 2:
            dist.recv(tensor)
        assert groups.ledger.counts_since_mark() == ()
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=rank.mesh.get_group("tp"))
        assert [(one.name, one.num_collectives) for one in groups.ledger.counts_since_mark()] == [
            ("0", 2),
            (rank.mesh.get_group("tp").group_name, 1),
        ]
        world = groups.counts()[0]
        assert world.ranks == ()
        assert world.num_collectives == 2
        assert world.num_sent == (((2, 1),) if rank.rank == 0 else ())
        assert world.num_received == (((0, 1),) if rank.rank == 2 else ())
        assert groups.ledger.current() is None
        groups.heal(1, ALL)
        assert {one.num_collectives for one in groups.counts()} == {0}

    with World(4, DIMS) as world:
        world.run(count)


def test_operation_that_a_rank_waits_in_is_known() -> None:
    def wait(rank: Rank) -> str:
        if rank.rank == 1:
            rank.listen()
            rank.groups.heal(1, ALL)
            return ""
        seen = []

        def look() -> None:
            done = threading.Event()
            while (operation := rank.groups.ledger.current()) is None or done.wait(0.1):
                done.wait(0.01)
            seen.append(operation)
            rank.tell("waits")
            rank.listen()
            rank.groups.release()

        thread = threading.Thread(target=look)
        thread.start()
        with pytest.raises(RuntimeError):
            dist.all_gather([torch.zeros(1)] * 4, torch.ones(1))
        thread.join()
        assert rank.groups.ledger.current() is None
        rank.groups.heal(1, ALL)
        assert seen[0].group == "0"
        return str(seen[0].name)

    with World(4, DIMS) as world:
        world.start(wait)
        for rank in (0, 2, 3):
            assert world.hear(rank) == "waits"
        world.tell("go")
        assert world.results() == ["all_gather", "", *["all_gather"] * 2]


def test_an_operation_that_is_waited_for_is_known_after_later_ones_have_ended() -> None:
    def wait(rank: Rank) -> None:
        groups, tp, dp = rank.groups, rank.mesh.get_group("tp"), rank.mesh.get_group("dp")
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

    with World(4, DIMS) as world:
        world.start(wait)
        assert world.hear(0) == "looked"
        world.tell("go")
