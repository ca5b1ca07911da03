"""Both sides of a mesh in memory: what a user sees of what ranks do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cellmesh.controller.core.core import ANSWER_S
from cellmesh.controller.core.runs import REPORT_AFTER_S
from cellmesh.controller.output.fold import HOLD_TRACE_S
from cellmesh.controller.run import Run
from cellmesh.errors import RankDied, RankFailure, RanksInterrupted

from ..support.scripted import World


def running(
    num_ranks: int, ranks: tuple[int, ...] | None = None, **options: Any
) -> tuple[World, Run[Any]]:
    """A mesh that has been started, and a run that its ranks have begun."""
    world = World(num_ranks, **options).start()
    return world, world.running(ranks)


# ---- runs


def test_a_run_on_some_ranks_reaches_no_others_and_has_the_value_of_each() -> None:
    world, run = running(4, ranks=(1, 3))
    assert [len(world.ranks[rank].queue) for rank in range(4)] == [0, 1, 0, 1]
    world.done(3, 1)
    assert run.result(0) == {1: 1, 3: 3}
    assert world.finished == {run.number: 1}


def test_arrays_cross_both_hops() -> None:
    world, run = running(2)
    for rank in (0, 1):
        world.ranks[rank].done(np.full(100_000, rank))
    world.wait(0.01)
    for rank, array in run.result(0).items():
        np.testing.assert_array_equal(array, np.full(100_000, rank))


def test_equal_answers_travel_as_one_message_and_at_once() -> None:
    world, run = running(8)
    before = world.num_up
    for rank in range(8):
        world.ranks[rank].done()
    world.deliver()
    assert run.done()
    assert world.num_up == before + 1


def test_runs_reach_a_rank_in_the_order_sent_and_one_rank_may_be_far_ahead() -> None:
    world = World(2).start()
    runs = [world.submit((0,)), world.submit(), world.submit((0,)), world.submit((1,))]
    world.deliver()
    assert list(world.ranks[0].queue) == [runs[0].number, runs[1].number, runs[2].number]
    assert list(world.ranks[1].queue) == [runs[1].number, runs[3].number]
    for _ in range(3):
        world.done(0)
    assert [run.waiting_ranks() for run in runs] == [[], [1], [], [1]]
    world.done(1)
    assert [run.done() for run in runs] == [True, True, True, False]


def test_work_for_control_threads_is_answered_while_ranks_are_busy() -> None:
    world, busy = running(2)
    look = world.look((0, 1))
    world.wait(0.01)
    assert look.result(0) == {0: "Names on 0", 1: "Names on 1"}
    assert not busy.done()


# ---- output


def test_a_line_of_all_ranks_is_shown_once_and_that_of_one_rank_soon() -> None:
    world, run = running(4)
    for step in range(3):
        for rank in range(4):
            world.ranks[rank].print(f"step {step}\n")
        world.wait(0.5)
    world.ranks[2].print("only me\n")
    world.wait(0.2)
    assert world.text_of(run) == "".join(f"[0-3] step {n}\n" for n in range(3)) + "[2] only me\n"
    assert not run.done()


def test_output_belongs_to_its_run() -> None:
    world = World(2).start()
    first, second = world.submit(), world.submit()
    world.deliver()
    world.ranks[0].print("first\n")
    world.ranks[0].done()
    world.ranks[0].print("second\n")
    world.write_below_python(0, "below\n")
    world.ranks[1].print("first\n")
    world.wait(1.0)
    assert world.text_of(first) == "[0-1] first\n"
    assert world.text_of(second) == "[0] second\n[0] below\n"


def test_all_output_is_shown_before_the_run_is_done() -> None:
    world, run = running(2)
    seen: list[str] = []
    run.on_end(lambda: seen.append(world.text_of(run)))
    for rank in (0, 1):
        world.ranks[rank].print("no newline")
        world.ranks[rank].done()
    world.deliver()
    assert seen == ["[0-1] no newline\n"]


def test_output_after_the_end_goes_to_its_run() -> None:
    world, run = running(2)
    following = world.running()
    world.done()
    assert run.done()
    late = world.ranks[1]
    late.queue.appendleft(run.number)  # a thread of the first run prints
    late.print("late\n")
    late.queue.popleft()
    world.wait(0.5)
    assert world.text_of(run) == "[1] late\n"
    assert world.text_of(following) == ""


# ---- failures


def test_a_failure_is_shown_while_the_others_run() -> None:
    world, run = running(4)
    world.ranks[3].fail(ValueError("nan"), line=4)
    world.wait(HOLD_TRACE_S)
    assert world.text_of(run) == "[3] ValueError: nan\n"
    assert not run.done()


@pytest.mark.parametrize(("silent", "after_s"), [(None, 0.0), (0, ANSWER_S)])
def test_waiting_ranks_are_shown_with_place_and_remedy(silent: int | None, after_s: float) -> None:
    world, run = running(4, on_error="wait")
    for rank in (0, 1, 2):
        world.ranks[rank].collective = "all_reduce"
        world.ranks[rank].answers_probes = rank != silent
    world.ranks[3].fail(ValueError("nan"))
    world.wait(REPORT_AFTER_S * 0.9 + after_s)
    assert "all_reduce" not in world.text_of(run)
    world.wait(REPORT_AFTER_S * 0.2)
    ranks = "0-2" if silent is None else "1-2"
    assert f"; ranks {ranks} in all_reduce at line 5. The stop button" in world.text_of(run)


def test_an_interrupt_reaches_the_ranks_that_still_run() -> None:
    world, run = running(3)
    world.done(1)
    run.interrupt()
    world.wait(0.01)
    assert [run.number in world.ranks[rank].interrupted for rank in range(3)] == [True, False, True]
    for rank in (0, 2):
        world.ranks[rank].obey()
    world.wait(0.01)
    with pytest.raises(RanksInterrupted, match="ranks 0,2 raised KeyboardInterrupt"):
        run.result(0)


# ---- deaths


def test_death_in_a_run_is_reported_within_half_a_second_and_ends_its_part() -> None:
    world, run = running(3)
    world.ranks[1].print("last line\n")
    world.reap(1, "killed by SIGKILL", "last line")
    world.wait(0.4)
    assert world.text_of(run) == "[1] last line\nrank 1 killed by SIGKILL\n"
    assert run.waiting_ranks() == [0, 2]
    world.done(0, 2)
    with pytest.raises(RankFailure, match="rank 1 killed by SIGKILL") as caught:
        run.result(0)
    assert isinstance(caught.value.exceptions_by_rank[1], RankDied)


def test_other_ranks_are_shown_after_a_death() -> None:
    world, run = running(3, on_error="wait")
    for rank in (0, 2):
        world.ranks[rank].collective = "all_gather"
    world.reap(1)
    world.wait(1.0)
    assert "rank 1 has ended; ranks 0,2 in all_gather at line 5" in world.text_of(run)


def test_work_that_crosses_the_news_of_a_death_ends_all_the_same() -> None:
    world = World(2).start()
    world.reap(1)
    run = world.running()  # the controller does not know yet
    world.done(0, seconds=0.5)
    with pytest.raises(RankFailure, match="rank 1 killed by SIGKILL; rank 0 finished"):
        run.result(0)
    assert world.core.state == "ready"


# ---- questions


def test_activity_of_ranks_that_answer_is_reported() -> None:
    world, _ = running(3, (1,))
    world.ranks[2].answers_probes = False
    request = world.ask_states((0, 1, 2))
    world.wait(ANSWER_S * 0.9)
    assert request not in world.answers
    world.wait(ANSWER_S * 0.2)
    states = world.answers[request]
    assert {rank: state.run for rank, state in states.items()} == {0: -1, 1: 1}


def test_the_report_of_the_agent_has_the_dead() -> None:
    world = World(2).start()
    world.reap(0, "exited with code 3")
    world.submit((1,))
    request = world.ask_host()
    world.deliver()
    infos = world.answers[request].ranks
    phases = [(info.phase, info.ending) for info in infos]
    assert phases == [("dead", "exited with code 3"), ("running", "")]
