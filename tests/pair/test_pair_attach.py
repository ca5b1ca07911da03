"""Both sides of a mesh in memory: controllers that go and come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import RankFailure

from ..support.examples import examples
from ..support.scripted import World

SUBSETS = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_a_run_goes_on_without_a_controller_and_the_next_one_has_it_whole() -> None:
    world = World(3).start()
    number = world.submit().number
    world.deliver()
    world.ranks[0].print("before\n")
    world.ranks[0].done("answered the first controller")
    world.wait(0.1)
    world.leave()
    world.ranks[1].print("missed\n")
    world.ranks[1].done("answered nobody")
    world.wait(0.1)
    welcome = world.attach()
    assert [(info.run, info.title, info.execution_count) for info in welcome.runs] == [
        (number, "run 1", 0)
    ]
    world.deliver()
    run = world.runs[number]
    assert run.waiting_ranks() == [2]
    world.ranks[2].done("answers the second")
    world.wait(0.5)
    assert list(run.result(0).values()) == [
        "answered the first controller",
        "answered nobody",
        "answers the second",
    ]
    assert "[1] missed\n" in world.text_of(run)
    assert "before" not in world.text_of(run), "the first controller has shown it"


def test_run_that_ended_while_detached_has_its_result() -> None:
    world = World(2).start()
    number = world.submit().number
    world.deliver()
    world.leave()
    for rank in (0, 1):
        world.ranks[rank].done(rank)
    world.wait(0.1)
    world.attach()
    world.deliver()
    assert world.runs[number].result(0) == {0: 0, 1: 1}
    again = world.submit()
    assert again.number == number + 1


def test_death_while_detached_is_reported() -> None:
    world = World(3).start()
    number = world.submit().number
    world.deliver()
    world.leave()
    world.reap(1, "was killed by SIGKILL", "words")
    for rank in (0, 2):
        world.ranks[rank].done()
    world.wait(0.5)
    world.attach()
    world.wait(0.5)
    assert set(world.core.dead) == {1}
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        world.runs[number].result(0)
    world.leave()
    world.attach()
    world.wait(0.5)
    assert set(world.core.dead) == {1}, "the third one knows as well"
    assert world.runs == {}


def test_ranks_that_hold_back_work_go_on_for_the_next_controller() -> None:
    world = World(2).start()
    world.submit()
    world.deliver()
    world.ranks[0].fail(ValueError("no"))
    world.leave()  # before it could see to that
    world.ranks[1].done()
    world.attach()
    world.wait(2.0)
    assert not any(rank.holds for rank in world.ranks.values())
    run = world.submit()
    world.deliver()
    for rank in (0, 1):
        world.ranks[rank].done(rank)
    world.wait(0.1)
    assert run.result(0) == {0: 0, 1: 1}


def test_even_if_the_failed_run_had_been_taken_in() -> None:
    world = World(2).start()
    world.submit()
    world.deliver()
    for rank in (0, 1):
        world.ranks[rank].fail(ValueError("no"))
        world.ranks[rank].answers_probes = False  # the recovery does not come far
    world.wait(0.1)
    assert world.finished == {1: 1}
    world.leave()
    for rank in (0, 1):
        world.ranks[rank].answers_probes = True
    world.attach()
    world.wait(3.0)
    assert not any(rank.holds for rank in world.ranks.values())


def test_a_heal_that_lost_its_controller_is_made_good() -> None:
    world = World(2).start()
    world.submit()
    world.deliver()
    world.ranks[0].is_broken = True
    for rank in (0, 1):
        world.ranks[rank].fail(ValueError("no"))
    world.wait(0.0)
    world.leave()
    world.attach()
    world.wait(3.0)
    assert not any(rank.is_broken or rank.holds for rank in world.ranks.values())


KINDS = {
    "submit": 4,
    "done": 8,
    "fail": 1,
    "print": 6,
    "die": 1,
    "down": 8,
    "up": 5,
    "wait": 3,
    "leave": 2,
}
STEP = st.tuples(
    st.sampled_from([kind for kind, weight in KINDS.items() for _ in range(weight)]),
    st.integers(0, 2),
    st.integers(0, 6),
)


@examples(100)
@given(st.lists(STEP, min_size=20, max_size=60))
def test_however_often_controllers_go_every_run_ends_once(
    steps: Sequence[tuple[str, int, int]],
) -> None:
    world = World(3).start()
    for kind, rank, number in steps:
        process = world.ranks.get(rank)
        match kind:
            case "submit":
                world.submit(SUBSETS[number])
            case "done" | "fail" | "print" if process is not None and process.running:
                arguments: tuple[Any, ...] = {"fail": (ValueError("no"),), "print": ("x\n",)}.get(
                    kind, ()
                )
                getattr(process, kind)(*arguments)
            case "die" if process is not None:
                world.reap(rank)
            case "down":
                world.deliver_down()
            case "up":
                world.deliver_up()
            case "wait":
                world.wait(0.3)
            case "leave":
                world.leave()
                if number % 2:
                    world.wait(1.0)
                world.attach()
    for _ in range(4 + len(steps)):
        world.wait(2.0)
        for process in world.ranks.values():
            while process.running:
                process.done()
        if not any(process.queue for process in world.ranks.values()):
            break
    world.wait(5.0)
    assert [run for run in world.runs.values() if not run.done()] == []
    assert world.finished == dict.fromkeys(world.runs, 1)
    assert not any(process.holds for process in world.ranks.values())
    assert set(world.core.dead) == set(range(3)) - set(world.ranks)
    assert world.spool.runs() == ()
