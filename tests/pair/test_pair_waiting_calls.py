"""Both sides of a mesh in memory: asynchronous calls that wait beside other work."""

from __future__ import annotations

import pytest

from cellmesh.controller.core.runs import STOP_S
from cellmesh.errors import RankDied, RankFailure, RanksInterrupted
from cellmesh.wire.groups import GroupCount
from cellmesh.wire.messages import Pickled
from cellmesh.wire.verbs import RunCall

from ..support.scripted import World


def test_work_begins_and_ends_beside_a_call_that_waits() -> None:
    world = World(2).start()
    call = world.waiting()
    work = world.running()
    assert [list(rank.queue) for rank in world.ranks.values()] == [[work.number]] * 2
    world.done()
    assert (work.done(), call.waiting_ranks()) == (True, [0, 1])
    for rank in world.ranks.values():
        rank.end_waiting(call.number)
    world.deliver()
    assert call.done()


def test_a_mesh_is_healed_beside_a_call_that_waits() -> None:
    world = World(2).start()
    call = world.waiting()
    world.reap(1, "killed by SIGKILL")
    world.wait(0.1)
    assert call.waiting_ranks() == [0]
    world.heal()
    world.wait(1.0)
    world.ranks[1].ready()
    world.wait(1.0)
    assert world.core.mesh.dead == {}
    assert call.waiting_ranks() == [0]
    world.ranks[0].end_waiting(call.number)
    world.wait(0.1)
    with pytest.raises(RankFailure, match="rank 1 killed by SIGKILL") as caught:
        call.result(0)
    assert [*caught.value.exceptions_by_rank] == [1]
    assert isinstance(caught.value.exceptions_by_rank[1], RankDied)


def test_a_failed_call_neither_ends_others_nor_holds_back_work() -> None:
    world = World(3, settle_s=0.1).start()
    call, other = world.waiting(), world.waiting()
    world.ranks[1].end_waiting(call.number, ValueError("no"))
    world.wait(10.0)
    assert (call.waiting_ranks(), other.waiting_ranks()) == ([0, 2], [0, 1, 2])
    assert not any(rank.released for rank in world.ranks.values())
    work = world.running()
    world.done()
    assert work.done()


def test_a_resize_names_the_calls_that_it_would_end() -> None:
    world = World(3).start()
    call = world.waiting((0, 2))
    why = world.core.why_not_resize(2)
    assert (
        why
        == f"it would end run {call.number} on rank 2: cancel that (`run.cancel()`), then resize"
    )
    assert (world.core.why_not_resize(3), world.core.why_not_resize(4)) == ("", "")


def test_cancelling_a_call_reaches_no_other() -> None:
    world = World(2).start()
    first, second = world.waiting(), world.waiting()
    work = world.running()
    first.cancel()
    world.deliver()
    assert [rank.interrupted for rank in world.ranks.values()] == [{first.number}] * 2
    for rank in world.ranks.values():
        rank.end_waiting(first.number, KeyboardInterrupt())
    world.deliver()
    with pytest.raises(RanksInterrupted):
        first.result(0)
    assert (second.done(), work.done()) == (False, False)


def test_a_call_is_cancelled_before_its_rank_has_got_to_it() -> None:
    world = World(1).start()
    begun = world.waiting()
    world.running()
    queued = world.begin(RunCall(0, Pickled(b""), interleaves=True), [0])
    world.deliver()
    world.ranks[0].waiting.remove(queued.number)  # it waits behind the run
    for run in (queued, begun):
        run.cancel()
        world.wait(0.1)
    assert queued.done()
    assert not begun.done()


def test_a_second_interrupt_kills_a_rank_whose_call_does_not_end() -> None:
    world = World(2).start()
    call, other = world.waiting(), world.waiting((1,))
    world.ranks[1].end_waiting(call.number)
    for _ in range(2):
        call.cancel()
        world.deliver()
    world.wait(STOP_S + 0.1)
    world.reap_doomed()
    world.wait(0.1)
    assert (call.done(), other.done()) == (True, False)


def test_a_controller_that_attaches_finds_calls_that_wait() -> None:
    world = World(2).start()
    call = world.waiting()
    world.leave()
    world.attach()
    world.wait(3.0)
    pending = world.core.mesh.pending[call.number]
    assert (pending.interleaves, pending.is_work) == (True, False)
    work = world.running()
    world.done()
    assert work.done()


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_whose_calls_wait_may_still_join_a_collective(waits: bool) -> None:
    world = World(2).start()
    if waits:
        world.waiting([0])
    run = world.running([1])
    world.core.wait_for(run.number)
    world.ranks[1].collective = "all_reduce"
    world.wait(10.0)
    assert bool(world.ranks[1].released) is not waits


@pytest.mark.parametrize("kind", ["met", "not met", "later call"])
def test_a_call_that_waits_joins_no_collective_after_those_of_a_later_run(kind: str) -> None:
    world = World(2).start()
    if kind != "later call":
        world.waiting([0])
    run = world.running()
    if kind == "later call":
        world.waiting([0])
    world.ranks[1].collective = "all_reduce"
    world.ranks[0].done(counts=() if kind == "not met" else (GroupCount("0", (), 3),))
    world.wait(10.0)
    assert run.waiting_ranks() == [1]
    assert bool(world.ranks[1].released) == (kind == "met")


@pytest.mark.parametrize("is_again", [True, False])
def test_a_rank_is_released_from_meeting_a_failed_call_whose_name_it_gets(is_again: bool) -> None:
    world = World(2).start()
    failing = world.running([0], fills=True)
    run = world.running([1])
    world.core.wait_for(run.number)
    world.ranks[1].collective = "all_reduce"
    world.ranks[0].fail(ValueError("no"))
    if is_again:
        world.wait(0.5)
        world.running([0], fills=True)
    world.wait(3.0)
    if is_again:  # it may still arrive
        assert not world.ranks[1].released
        world.done(0, seconds=3.0)
    world.ranks[1].obey()
    world.wait(0.5)
    with pytest.raises(RankFailure) as caught:
        run.result(0)
    assert (f"run {failing.number} has failed on rank 0" in str(caught.value)) is not is_again


def test_a_death_is_shown_once_for_calls_of_one_method_that_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World(2).start()
    calls, others = [world.waiting() for _ in range(4)], [world.running([1]) for _ in range(2)]
    for call in calls:
        world.core.mesh.pending[call.number].title = "generator.values"
    world.reap(1, "was killed by SIGKILL")
    world.wait(0.5)
    texts = [world.text_of(run).count("killed by SIGKILL") for run in (*calls, *others)]
    assert texts == [1, 0, 0, 0, 1, 0]
    assert [run.failed_ranks() for run in (*calls, *others)] == [[1]] * 6
