"""Both sides of a mesh in memory: dead ranks that are replaced for the sake of their actors."""

from __future__ import annotations

from cellmesh.wire.messages import Respawned

from ..support.scripted import World


def replace(world: World, *ranks: int) -> None:
    world.wait(0.05)
    world.carry_out(world.core.replace(ranks, world.now))


def come_up(world: World, *ranks: int) -> None:
    world.wait(0.1)
    for rank in ranks:
        world.ranks[rank].ready()
    world.wait(1.0)
    assert not world.core.dead


def test_a_rank_is_replaced_at_once_if_no_rank_has_work() -> None:
    world = World(3).start()
    waits = world.waiting((0, 1))
    world.reap(1)
    replace(world, 1)
    come_up(world, 1)
    assert waits.waiting_ranks() == [0]


def test_a_rank_is_replaced_once_no_rank_has_work() -> None:
    world = World(3).start()
    work = world.running((0,))
    world.reap(1)
    replace(world, 1)
    world.wait(1.0)
    assert [*world.core.dead] == [1]
    assert not work.done()
    world.done(0)
    come_up(world, 1)


def test_a_rank_is_replaced_after_the_failed_run_in_which_it_died() -> None:
    world = World(2, settle_s=0.1).start()
    work = world.running()
    world.reap(1)
    replace(world, 1)
    world.wait(0.05)
    assert [*world.core.dead] == [1]
    world.wait(0.5)
    world.ranks[0].obey()
    come_up(world, 1)
    assert work.failed_ranks() == [0, 1]
    (note,) = world.notes
    assert "rank 1 is new, process groups rebuilt in" in note
    assert "--from" not in note
    work = world.running(fills=True)
    for process in world.ranks.values():
        process.done()
    world.wait(1.0)
    assert world.notes == [note]


def test_ranks_that_die_together_are_replaced_together() -> None:
    world = World(4).start()
    world.reap(1)
    world.reap(2)
    replace(world, 1, 2)
    come_up(world, 1, 2)
    (respawned,) = world.causes(Respawned)
    assert {info.rank for info in respawned.ranks} == {1, 2}


def test_ranks_that_live_are_not_replaced() -> None:
    world = World(2).start()
    replace(world, 0)
    world.wait(0.5)
    world.reap(0)
    world.wait(0.5)
    assert [*world.core.dead] == [0]
