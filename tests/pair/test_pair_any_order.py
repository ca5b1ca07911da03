"""Both sides of a mesh in memory, whatever happens and in whatever order."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.run import Run
from cellmesh.errors import RankFailure
from cellmesh.workers.agent.supervisor import LEAVE_S

from ..support.examples import examples
from ..support.scripted import World

SUBSETS = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
Step = tuple[str, int, int]


def steps_of(**kinds: int) -> st.SearchStrategy[list[Step]]:
    """Long lists of events, each as often as its weight says, with a rank and another number."""
    weighted = [kind for kind, weight in kinds.items() for _ in range(weight)]
    step = st.tuples(st.sampled_from(weighted), st.integers(0, 2), st.integers(0, 6))
    return st.lists(step, min_size=30, max_size=80)


def shown_by(world: World, run: Run[Any], rank: int) -> list[str]:
    """Return a rank's lines on the console, without remarks, which have no label."""
    said = []
    for line in world.text_of(run).splitlines():
        label, _, text = line.partition("] ")
        spans = [part.split("-") for part in label[1:].split(",")] if line.startswith("[") else []
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            said.append(text)
    return said


@examples(60)
@given(steps=steps_of(submit=3, done=8, fail=1, print=12, down=6, up=3, tick=2, wait=1, long=1))
def test_every_run_ends_once_with_every_ranks_own_answer_and_output(steps: Sequence[Step]) -> None:
    world = World(3).start()
    answers: dict[int, dict[int, Any]] = collections.defaultdict(dict)
    printed: dict[tuple[int, int], list[str]] = collections.defaultdict(list)

    def act(kind: str, rank: int, number: int) -> None:
        process = world.ranks[rank]
        if not process.running:
            return
        run = process.queue[0]
        if kind == "print":
            line = f"line {number % 3}"
            printed[run, rank].append(line)
            process.print(f"{line}\n")
        elif kind == "done":
            answers[run][rank] = f"{run} on {rank}" if number % 2 else None
            process.done(answers[run][rank])
        else:
            answers[run][rank] = ValueError
            process.fail(ValueError("no"))

    for kind, rank, number in steps:
        match kind:
            case "submit":
                world.submit(SUBSETS[number])
            case "down":
                world.deliver_down()
            case "up":
                world.deliver_up()
            case "tick":
                world.tick()
            case "wait" | "long":
                world.wait(0.004 if kind == "wait" else 0.3)
            case _:
                act(kind, rank, number)
    world.deliver()
    for _ in range(len(world.runs) + 1):  # what is held back goes on when all have ended the run
        for rank, process in world.ranks.items():
            while process.running:
                act("done", rank, 1)
        world.wait(2.0)
    assert world.finished == dict.fromkeys(world.runs, 1)
    for number, run in world.runs.items():
        assert sorted(world.settled[number]) == sorted(run.ranks)
        failed = {rank for rank, value in answers[number].items() if value is ValueError}
        if failed:
            with pytest.raises(RankFailure) as caught:
                run.result(0)
            assert set(caught.value.exceptions_by_rank) == failed
        else:
            assert run.result(0) == answers[number]
        for rank in run.ranks:
            lines = [line for line in shown_by(world, run, rank) if line.startswith("line ")]
            assert lines == printed[number, rank]


def is_up(world: World, rank: int) -> bool:
    return world.supervisor.report({})[rank].phase in ("idle", "running")


def play(world: World, steps: Sequence[Step]) -> list[int]:
    """Carry out the steps, then let all work end and starting ranks get ready.

    Returns:
        The requests for states.
    """
    asked: list[int] = []
    for kind, rank, number in steps:
        process = world.ranks.get(rank)
        match kind:
            case "submit":
                world.submit(SUBSETS[number])
            case "done" | "fail" | "print" | "obey" if process is not None and process.running:
                given = {"fail": [ValueError("no")], "print": ["x\n"]}
                getattr(process, kind)(*given.get(kind, ()))
            # A rank that dies while the mesh starts would end it.
            case "die" if process and (world.supervisor.state == "ready" or process.is_doomed):
                world.reap(rank)
            case "interrupt" if world.runs:
                list(world.runs.values())[number % len(world.runs)].interrupt()
            case "restart":
                world.restart()
            case "reap":
                world.reap_doomed()
            case "ready" if process and not is_up(world, rank) and not process.is_doomed:
                process.ready()
            case "down":
                world.deliver_down()
            case "up":
                world.deliver_up()
            case "wait":
                world.wait(0.3)
            case "states":
                asked.append(world.ask_states(SUBSETS[number]))
            case "look":
                world.look((rank,))
            case "mute" if process is not None:
                process.answers_probes = not process.answers_probes
            case "leave":
                world.leave()
                world.wait(1.0 * (number % 2))
                world.attach()
    for _ in range(4 + sum(kind == "submit" for kind, _, _ in steps)):
        world.wait(2.0)
        world.reap_doomed()
        for rank, process in list(world.ranks.items()):
            if not is_up(world, rank):
                process.ready()
            while process.running:
                process.done()
    world.wait(5.0)
    assert [run for run in world.runs.values() if not run.done()] == []
    assert world.finished == dict.fromkeys(world.runs, 1)
    assert set(world.core.dead) == set(range(3)) - set(world.ranks)
    return asked


STEPS = steps_of(
    submit=4, done=6, fail=2, print=2, die=3, interrupt=2, obey=1, restart=2, reap=3, ready=6,
    down=8, up=5, wait=2, states=2, look=2, mute=1,
)  # fmt: skip


@examples(100)
@given(steps=STEPS, stops=st.booleans())
def test_every_run_and_the_mesh_end_once_for_any_events(steps: Sequence[Step], stops: bool) -> None:
    world = World(3).start()
    asked = play(world, steps)
    assert world.core.state == "ready"
    assert set(asked) == set(world.answers)
    assert (world.core.deadline(), world.supervisor.deadline()) == (None, None)
    last = world.submit()  # what is asked for at the end ends as well
    world.deliver()
    if stops:
        world.stop()
        world.wait(LEAVE_S)
        world.reap_doomed()
        assert (world.ended, world.ranks) == (1, {})
    else:
        world.lose_agent()
    assert last.done()
    assert world.core.state == "ended"
    assert world.finished == dict.fromkeys(world.runs, 1)
    for number, run in world.runs.items():
        assert sorted(world.settled[number]) == sorted(run.ranks)


@examples(100)
@given(steps_of(submit=4, done=8, fail=1, print=6, die=1, down=8, up=5, wait=3, leave=2))
def test_however_often_controllers_go_every_run_ends_once(steps: Sequence[Step]) -> None:
    world = World(3).start()
    play(world, steps)
    assert not any(process.holds for process in world.ranks.values())
    assert world.spool.runs() == ()
