"""Ranks that die, come anew, do not come at all, or come to a store that was replaced."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from cellmesh.errors import GroupDown
from tests.mesh.forked import Rank, World

ALL = frozenset(range(4))
DIMS = {"dp": 2, "tp": 2}


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


@pytest.mark.parametrize("dead", [{2}, {0}, {1, 3}])
def test_new_ranks_take_the_place_of_dead_ones_in_every_group(dead: set[int]) -> None:
    with World(4, DIMS) as world:
        world.start(_survive)
        blueprints = [world.hear(rank) for rank in range(4)]
        for rank in dead:
            world.kill(rank)
        world.start(_come_anew, *dead, blueprint=blueprints[min(ALL - dead)])
        world.tell("go", *(ALL - dead))
        world.results()


def test_all_ranks_are_replaced_when_none_survives() -> None:
    def come(rank: Rank) -> None:
        rank.groups.heal(1, ALL)
        assert _sum() == 4
        assert _sum(rank.mesh.get_group("dp")) == _sum(rank.mesh.get_group("tp")) == 2

    with World(4, DIMS) as world:
        world.start(lambda rank: rank.tell("up") or rank.listen())
        for rank in range(4):
            world.hear(rank)
            world.kill(rank)
        world.start(come, blueprint=b"")
        world.results()


def test_group_with_a_missing_member_names_the_rank_and_the_command() -> None:
    def go_on(rank: Rank) -> None:
        tp = rank.mesh.get_group("tp")  # ranks 0, 1 and ranks 2, 3
        rank.tell("up")
        if rank.rank == 3:
            rank.listen()
        rank.listen()
        rank.groups.heal(1, frozenset({0, 1, 2}))
        with pytest.raises(GroupDown, match=r"of all ranks is down: rank 3 is missing.*dist_heal"):
            _sum()
        if rank.rank == 2:
            with pytest.raises(GroupDown, match=r"of ranks 2, 3 is down: rank 3 is missing"):
                _sum(tp)
        else:
            assert _sum(tp) == 2
        rank.tell(rank.groups.blueprint())
        rank.listen()
        rank.groups.heal(2, ALL)
        assert _sum() == 4

    def come(rank: Rank) -> None:
        rank.groups.heal(2, ALL)
        assert _sum() == 4

    with World(4, DIMS) as world:
        world.start(go_on)
        for rank in range(4):
            world.hear(rank)
        world.kill(3)
        world.tell("go", 0, 1, 2)
        blueprint, *_ = [world.hear(rank) for rank in range(3)]
        world.start(come, 3, blueprint=blueprint)
        world.tell("go", 0, 1, 2)
        world.results()


def test_heal_without_one_rank_ends_with_an_interrupt() -> None:
    def heal(rank: Rank) -> None:
        if rank.rank == 1:
            rank.tell("up")
            rank.listen()
        else:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                rank.groups.heal(1, frozenset({0, 1}))
            assert rank.groups.is_broken
            with pytest.raises(GroupDown, match="interrupted"):
                _sum()
            rank.tell("interrupted")
        rank.groups.heal(2, frozenset({0, 1}))
        assert _sum() == 2

    with World(2) as world:
        world.start(heal)
        world.hear(1)
        assert world.hear(0) == "interrupted"
        world.tell("go", 1)
        world.results()


def test_a_participant_that_dies_in_the_middle_leaves_the_others_able_to_heal() -> None:
    def heal(rank: Rank) -> None:
        if rank.rank == 2:  # it comes to the meeting and dies while groups are connected
            end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            rank.groups._rebuild = end  # type: ignore[method-assign, assignment]
            rank.groups.heal(1, ALL)
        else:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            rank.groups.heal(1, ALL)
        rank.groups.heal(2, frozenset({0, 1, 3}))
        if rank.rank in (1, 3):
            assert _sum(rank.mesh.get_group("dp")) == 2

    with World(4, DIMS) as world:
        world.start(heal)
        world.results(of={0, 1, 3})


def test_groups_heal_over_a_store_that_was_replaced() -> None:
    def heal(rank: Rank) -> None:
        rank.tell("up")
        rank.groups.heal(1, frozenset({0, 1}), store_port=rank.listen())
        assert _sum() == 2
        assert _sum(dist.new_group([0, 1])) == 2

    with World(2) as world:
        world.start(heal)
        for rank in range(2):
            world.hear(rank)
        world.kill_store()
        world.tell(world.start_store())
        world.results()


def test_a_default_group_that_some_have_destroyed_is_there_again() -> None:
    def begin_anew(rank: Rank) -> None:
        if rank.rank == 0:
            dist.destroy_process_group()
        rank.groups.heal(1, frozenset({0, 1}))
        assert _sum() == 2
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


def test_destroyed_groups_are_let_go() -> None:
    def make_and_destroy(rank: Rank) -> None:
        num_sockets = []
        for _ in range(4):
            group = dist.new_group([0, 1])
            assert _sum(group) == 2
            dist.destroy_process_group(group)
            del group
            num_sockets.append(len(os.listdir("/proc/self/fd")))
        assert num_sockets[-1] <= num_sockets[0], num_sockets
        assert [one.name for one in rank.groups.counts()] == ["0"]

    with World(2) as world:
        world.run(make_and_destroy)
