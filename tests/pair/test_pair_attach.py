"""Both sides of a mesh in memory: controllers that go and come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from cellmesh.errors import RankFailure

from ..support.examples import examples
from ..support.scripted import World
from .test_pair_any_order import SUBSETS, Step, steps_of


def test_a_run_goes_on_without_a_controller_and_the_next_one_has_it_whole() -> None:
    world = World(3).start()
    number = world.running().number
    world.ranks[0].print("before\n")
    world.done(0, seconds=0.1)
    world.leave()
    world.ranks[1].print("missed\n")
    world.done(1, seconds=0.1)
    welcome = world.attach()
    infos = [(info.run, info.title, info.execution_count) for info in welcome.runs]
    assert infos == [(number, "run 1", 0)]
    world.deliver()
    run = world.runs[number]
    assert run.waiting_ranks() == [2]
    world.done(2, seconds=0.5)
    assert run.result(0) == {0: 0, 1: 1, 2: 2}
    assert "[1] missed\n" in world.text_of(run)
    assert "before" not in world.text_of(run), "the first controller has shown it"


def test_run_that_ended_while_detached_has_its_result() -> None:
    world = World(2).start()
    number = world.running().number
    world.leave()
    world.done(seconds=0.1)
    world.attach()
    world.deliver()
    assert world.runs[number].result(0) == {0: 0, 1: 1}
    assert world.submit().number == number + 1


def test_death_while_detached_is_reported() -> None:
    world = World(3).start()
    number = world.running().number
    world.leave()
    world.reap(1, "was killed by SIGKILL", "words")
    world.done(0, 2, seconds=0.5)
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


@pytest.mark.parametrize("when", ["before the end", "after the end", "in the heal"])
def test_ranks_that_hold_back_work_go_on_for_the_next_controller(when: str) -> None:
    world = World(2).start()
    world.running()
    world.ranks[0].is_broken = when == "in the heal"
    for process in world.ranks.values():
        process.answers_probes = when != "after the end"  # the recovery does not come far
        process.fail(ValueError("no"))
    if when != "before the end":
        world.wait(0.1 if when == "after the end" else 0.0)
    assert world.finished == ({} if when == "before the end" else {1: 1})
    world.leave()
    for process in world.ranks.values():
        process.answers_probes = True
    world.attach()
    world.wait(3.0)
    assert not any(process.is_broken or process.holds for process in world.ranks.values())
    run = world.running()
    world.done(seconds=0.1)
    assert run.result(0) == {0: 0, 1: 1}


@examples(100)
@given(steps_of(submit=4, done=8, fail=1, print=6, die=1, down=8, up=5, wait=3, leave=2))
def test_however_often_controllers_go_every_run_ends_once(
    steps: Sequence[Step],
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
