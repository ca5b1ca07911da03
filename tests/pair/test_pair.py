"""Both sides of a mesh in memory: what a user sees of what ranks do."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.run import Run
from cellmesh.errors import RankDied, RankFailure
from cellmesh.wire.messages import MeshReady, StartFailed, Stopped

from ..support.scripted import World


def running(num_ranks: int, **options: Any) -> tuple[World, Run[Any]]:
    """A mesh that has been started, and a run that its ranks have begun."""
    world = World(num_ranks, **options).start()
    return world, world.running()


# ---- runs and their output


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


def test_work_for_control_threads_is_answered_while_ranks_are_busy() -> None:
    world, busy = running(2)
    look = world.look((0, 1))
    world.wait(0.01)
    assert look.result(0) == {0: "Names on 0", 1: "Names on 1"}
    assert not busy.done()


def test_output_belongs_to_its_run_also_after_its_end() -> None:
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
    world.ranks[0].queue.appendleft(first.number)  # a thread of the first run prints
    world.ranks[0].print("late\n")
    world.wait(0.5)
    assert world.text_of(first) == "[0-1] first\n[0] late\n"


# ---- failures and deaths


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


# ---- starts, restarts, ends


def test_start_of_a_mesh_reports_its_progress() -> None:
    world = World(3).start()
    assert [change.state for change in world.changes][-1] == "ready"
    stages = [getattr(change.cause, "stage", "") for change in world.changes]
    assert stages == ["", "importing torch", "forking ranks", *["process group"] * 3, ""]
    [ready] = world.causes(MeshReady)
    infos = [(info.rank, info.pid, info.phase) for info in ready.ranks]
    assert infos == [(rank, 1000 + rank, "idle") for rank in range(3)]
    assert world.core.mesh.ranks == ready.ranks


def test_a_rank_that_dies_while_it_starts_fails_the_start() -> None:
    world = World(3)
    world.import_torch()
    world.reap(1, "exited with code 1", "ImportError: no")
    world.deliver()
    [failed] = world.causes(StartFailed)
    assert failed.fault == "host"
    assert "rank 1 exited with code 1 while it started\nImportError: no" in failed.text
    assert world.ended == 0
    world.reap_doomed()
    assert world.ended == 1
    assert world.core.state == "ended"


def test_a_restart_ends_runs_in_flight_and_begins_afresh() -> None:
    world, run = running(3)
    world.done(0)
    world.restart()
    with pytest.raises(RankFailure, match=r"ranks 1-2 (was|were) restarted"):
        run.result(0)
    world.ranks[1].done()  # crosses the restart
    world.deliver()
    world.reap_doomed()
    assert [process.pid for process in world.ranks.values()] == [2000, 2001, 2002]
    assert world.core.state == "restarting"
    world.get_ready()
    again = world.running()
    world.done()
    assert again.result(0) == {0: 0, 1: 1, 2: 2}


def test_a_stop_lets_ranks_leave_and_ends() -> None:
    world, run = running(2)
    world.stop()
    world.deliver()
    assert all(process.was_asked_to_leave for process in world.ranks.values())
    world.reap_doomed()
    assert (world.ended, world.core.state) == (1, "ended")
    assert world.causes(Stopped) == [Stopped("stopped")]
    with pytest.raises(RankFailure, match="ended with"):
        run.result(0)


# ---- controllers that go


def test_a_run_goes_on_without_a_controller_and_the_next_one_has_it_whole() -> None:
    world, first = running(3)
    world.ranks[0].print("before\n")
    world.done(0, seconds=0.1)
    world.leave()
    world.ranks[1].print("missed\n")
    world.done(1, seconds=0.1)
    [info] = world.attach().runs
    assert (info.run, info.title, info.execution_count) == (first.number, "run 1", 0)
    world.deliver()
    run = world.runs[first.number]
    assert run.waiting_ranks() == [2]
    world.done(2, seconds=0.5)
    assert run.result(0) == {0: 0, 1: 1, 2: 2}
    assert "[1] missed\n" in world.text_of(run)
    assert "before" not in world.text_of(run), "the first controller has shown it"


def test_death_while_detached_is_reported() -> None:
    world, first = running(3)
    world.leave()
    world.reap(1, "was killed by SIGKILL", "words")
    world.done(0, 2, seconds=0.5)
    world.attach()
    world.wait(0.5)
    assert set(world.core.dead) == {1}
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        world.runs[first.number].result(0)
    world.leave()
    world.attach()
    world.wait(0.5)
    assert set(world.core.dead) == {1}, "the third one knows as well"
    assert world.runs == {}
