"""Both sides of a mesh in memory: new ranks, and the notes that they are empty."""

from __future__ import annotations

import pytest

from ..support.scripted import World

NOTE = (
    "rank 1 was killed by SIGKILL; it is new and empty (`%dist_heal --from 0` copies from a rank)"
)


def die(world: World, rank: int, signal: str = "SIGKILL") -> None:
    world.reap(rank, f"was killed by {signal}", "last words")
    world.wait(1.0)


def come_up(world: World, rank: int) -> None:
    """A rank that the agent has forked joins the groups."""
    world.ranks[rank].ready()
    world.wait(1.0)
    assert not world.core.dead


def healed(rank: int = 1, world: World | None = None) -> World:
    """Three ranks, of which one has replaced another since the user asked."""
    world = world or World(3).start()
    die(world, rank)
    world.heal()
    world.wait(1.0)
    come_up(world, rank)
    return world


def auto_healed() -> World:
    world = World(3, auto_heal=True).start()
    die(world, 1)
    come_up(world, 1)
    return world


def empty_ranks(world: World) -> dict[int, str]:
    """rank -> how its predecessor ended, as the agent says."""
    request = world.ask_host()
    world.deliver()
    infos = world.answers[request].ranks
    return {info.rank: info.predecessor_ending for info in infos if info.predecessor_ending}


def end(world: World, fails: tuple[int, ...] = ()) -> None:
    """Every rank ends the first of its runs."""
    world.deliver()
    for rank, process in list(world.ranks.items()):
        process.fail(NameError("model")) if rank in fails else process.done()
    world.wait(2.0)


def test_a_rank_is_empty_until_users_work_has_ended_well_on_it() -> None:
    world = healed()
    assert empty_ranks(world) == {1: "was killed by SIGKILL"}
    world.submit()  # only looks
    end(world)
    assert empty_ranks(world).keys() == {1}
    world.submit(fills=True)
    end(world, fails=(1,))  # what it needs is not there
    assert empty_ranks(world).keys() == {1}
    world.submit(fills=True)
    end(world)
    assert empty_ranks(world) == {}
    assert empty_ranks(healed(2, world)).keys() == {2}
    world.restart()
    world.begin_again()
    assert empty_ranks(world) == {}


def test_next_cell_names_auto_healed_ranks_once() -> None:
    world = auto_healed()
    assert world.notes == []
    run = world.running(fills=True)
    world.ranks[0].print("text")
    end(world)
    assert world.text_of(run).splitlines()[0] == NOTE
    world.submit(fills=True)
    end(world)
    assert world.notes == [NOTE]


@pytest.mark.parametrize("how", ["asked", "asked later", "dead again"])
def test_known_or_untrue_emptiness_is_not_noted(how: str) -> None:
    world = healed() if how == "asked" else auto_healed()
    if how == "asked later":
        world.heal()
        world.wait(1.0)
    elif how == "dead again":
        die(world, 1, "SIGSEGV")
        come_up(world, 1)
    world.notes.clear()
    world.submit(fills=True)
    end(world)
    assert world.notes == ([NOTE.replace("SIGKILL", "SIGSEGV")] if how == "dead again" else [])


def test_another_controller_has_the_empty_ranks_and_the_last_output_of_the_dead() -> None:
    world = World(3).start()

    def words() -> str:
        request = world.ask_host()
        world.deliver()
        return str(world.answers[request].ranks[1].last_output)

    die(world, 1)
    assert words() == "last words"
    world.leave()
    world.attach()
    world.wait(3.0)
    assert world.core.dead[1].last_output == "last words"
    world.heal()
    world.wait(1.0)
    come_up(world, 1)
    world.leave()
    world.attach()
    world.wait(3.0)
    assert (words(), empty_ranks(world).keys()) == ("last words", {1})
    assert world.text_of(world.running(fills=True)).strip() == NOTE
    end(world)
    assert words() == ""
