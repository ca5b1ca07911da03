"""Both sides of a mesh in memory, whatever happens and in whatever order."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

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
                run = process.queue[0]
                arguments = {
                    "done": [f"{run} on {rank}"],
                    "fail": [ValueError("no")],
                    "print": [f"line of {run}\n"],
                }
                getattr(process, kind)(*arguments.get(kind, ()))
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
                process.done(f"{process.queue[0]} on {rank}")
    world.wait(5.0)
    assert [run for run in world.runs.values() if not run.done()] == []
    assert world.finished == dict.fromkeys(world.runs, 1)
    assert set(world.core.dead) == set(range(3)) - set(world.ranks)
    for number, run in world.runs.items():  # which have their own answers and output
        with contextlib.suppress(RankFailure):
            for rank, value in run.result(0).items():
                assert value in (f"{number} on {rank}", f"Names on {rank}")
        assert set(re.findall(r"line of (\d+)", world.text_of(run))) <= {str(number)}
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
