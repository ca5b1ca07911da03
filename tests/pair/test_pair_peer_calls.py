"""Both sides of a mesh in memory: calls of other ranks, which the controller has not sent."""

from __future__ import annotations

import msgspec
import pytest

from cellmesh.controller.core.effects import HealReport
from cellmesh.controller.core.recovery import PATIENCE_S
from cellmesh.controller.failure_summary import describe_state
from cellmesh.wire.peer_calls import PEER_RUNS, PeerWork
from cellmesh.wire.status import RankState

from ..support.scripted import World

TITLE = "generator.sample for trainer 0"


def call_of(*ranks: int, number: int = 1) -> PeerWork:
    """Return a call of another rank, as its ranks report it."""
    return PeerWork(PEER_RUNS.start + 16 * number, TITLE, ranks)


def serving(world: World, *ranks: int, of: tuple[int, ...] = (), number: int = 1) -> PeerWork:
    """Have ranks execute a call, and report that."""
    call = call_of(*(of or ranks), number=number)
    for rank in ranks:
        world.ranks[rank].serve(call)
    world.wait(0.01)
    return call


def replaced(world: World, rank: int) -> bool:
    """Let a new process of a rank get ready; return whether there is one."""
    world.wait(0.5)
    if rank in world.ranks and world.core.mesh.dead:
        world.ranks[rank].ready()
        world.wait(0.5)
    return not world.core.mesh.dead


def test_the_controller_knows_a_call_of_another_rank_and_its_end() -> None:
    world = World(2).start()
    call = serving(world, 1)
    assert world.core.mesh.with_work() == {1}
    assert (str(world.runs[call.run]), world.runs[call.run].is_query) == (
        f"{TITLE} on rank 1: waits for rank 1",
        False,
    )
    serving(world, 0, of=(0, 1))
    world.ranks[1].end_serving()
    world.ranks[0].end_serving(KeyError("no"))
    world.wait(0.1)
    assert (world.core.mesh.with_work(), world.finished[call.run]) == (set(), 1)
    assert world.text_of(world.runs[call.run]) == ""
    assert not world.core.mesh.held
    run = world.running()
    world.done()
    assert run.done()


def test_a_report_that_is_repeated_or_late_changes_nothing() -> None:
    world = World(2).start()
    call = serving(world, 1)
    world.ranks[1]._say(call)
    world.reap(1)
    world.wait(0.5)
    assert (world.settled[call.run], world.finished[call.run]) == ([1], 1)


@pytest.mark.parametrize("is_asked", [True, False], ids=["heal", "on_death"])
def test_a_dead_rank_is_replaced_once_the_call_of_another_rank_ends(is_asked: bool) -> None:
    world = World(2).start()
    serving(world, 0)
    world.reap(1)
    world.wait(0.1)
    request = 0
    if is_asked:
        request = world.heal()
    else:
        world.carry_out(world.core.replace([1], world.now))
    assert not replaced(world, 1)
    world.ranks[0].end_serving()
    assert replaced(world, 1)
    assert world.answers.get(request, HealReport()).failure == ""


def test_a_heal_names_the_call_that_does_not_end() -> None:
    world = World(2).start()
    serving(world, 0)
    world.reap(1)
    request = world.heal()
    world.wait(PATIENCE_S + 1.0)
    text = f"rank 0 must be idle for that, and rank 0 runs {TITLE}: wait, or stop what runs with"
    assert text in world.answers[request].failure


def test_a_dead_rank_is_replaced_between_short_calls_without_a_gap() -> None:
    world = World(2).start()
    world.ranks[0].serve(call_of(0), is_reported=False)
    world.reap(1)
    for number in range(2, 8):
        world.wait(0.5)
        world.carry_out(world.core.replace([1], world.now))
        if 1 in world.ranks and not number % 2:
            world.ranks[1].ready()
        world.wait(0.1)
        world.ranks[0].end_serving(is_reported=False)
        world.ranks[0].serve(call_of(0, number=number), is_reported=False)
    world.wait(0.1)
    assert not world.core.mesh.dead


def test_a_heal_waits_for_a_call_that_began_just_before_it() -> None:
    world = World(2).start()
    call = call_of(0)
    world.ranks[0].serve(call, is_reported=False)
    world.reap(1)
    world.wait(0.5)
    assert not world.core.mesh.idle()
    world.ranks[0]._say(call)
    world.carry_out(world.core.replace([1], world.now))
    world.wait(200.0)
    assert not world.ranks[0].released
    world.ranks[0].end_serving()
    assert replaced(world, 1)


def test_an_interrupt_reaches_the_call_and_the_runs_that_wait_for_it() -> None:
    world = World(2).start()
    call = serving(world, 0)
    run = world.running([0])
    assert world.core.mesh.running([0]) == {0: TITLE}
    world.carry_out(world.core.interrupt([run.number, call.run], world.now))
    world.wait(0.1)
    assert world.ranks[0].interrupted == {call.run, run.number}
    assert run.done()
    world.ranks[0].end_serving(KeyboardInterrupt())
    world.wait(0.1)
    assert world.finished[call.run] == 1


def test_ranks_of_a_cancelled_call_are_stopped_together_and_once() -> None:
    world = World(3).start()
    call = serving(world, 0, 1)
    cancelled = msgspec.structs.replace(call, is_cancelled=True)
    for rank in (0, 1):
        world.ranks[rank]._say(cancelled)
        world.wait(0.1)
    assert [call.run in rank.interrupted for rank in world.ranks.values()] == [True, True, False]
    world.wait(3.0)
    assert not any(rank.is_doomed for rank in world.ranks.values())
    for rank in (0, 1):
        world.ranks[rank].end_serving(KeyboardInterrupt())
    world.wait(0.1)
    assert world.finished[call.run] == 1


def test_a_run_behind_a_call_of_another_rank_is_taken_back_at_once() -> None:
    world = World(1).start()
    call = serving(world, 0)
    run = world.running()
    run.interrupt()
    world.wait(0.1)
    assert run.done()
    assert not world.runs[call.run].done()


def test_a_second_interrupt_kills_a_rank_that_does_not_leave_the_call() -> None:
    world = World(2).start()
    call = serving(world, 0)
    for _ in range(2):
        world.carry_out(world.core.interrupt([call.run], world.now))
        world.deliver()
    world.wait(3.0)
    assert [rank.is_doomed for rank in world.ranks.values()] == [True, False]


def test_a_resize_names_the_call_that_it_would_end() -> None:
    world = World(2).start()
    serving(world, 1)
    assert f"rank 1 runs {TITLE}: wait, or stop" in world.core.why_not_resize(1)


@pytest.mark.parametrize("how", ["fails first", "fails later", "dies first", "dies later"])
def test_ranks_are_released_from_a_call_that_another_rank_does_not_end(how: str) -> None:
    world = World(3, settle_s=1.0).start()
    call = call_of(0, 1)

    def lose_rank_1() -> None:
        if "dies" in how:
            world.reap(1)
        else:
            world.ranks[1].serve(call, is_reported=False)
            world.ranks[1].end_serving(ValueError("no"))
        world.wait(0.01)

    if "first" in how:
        lose_rank_1()
    serving(world, 0, of=(0, 1))
    if "later" in how:
        lose_rank_1()
    world.ranks[0].collective = "all_reduce"
    world.wait(0.5)
    assert not world.ranks[0].released
    world.wait(1.0)
    assert world.ranks[0].released == {call.run}
    assert not world.ranks[2].released


def test_ranks_that_serve_others_are_not_taken_for_idle() -> None:
    world = World(2).start()
    world.ranks[1].serve(call_of(1, number=2), is_reported=False)
    run = world.running([0])
    world.core.wait_for(run.number)
    world.ranks[0].collective = "all_reduce"
    world.wait(10.0)
    assert not world.ranks[0].released


def test_a_controller_that_attaches_is_informed_of_calls() -> None:
    world = World(2).start()
    call = serving(world, 0)
    world.leave()
    world.attach()
    world.wait(3.0)
    world.ranks[0]._say(call)
    world.wait(0.1)
    assert world.core.mesh.with_work() == {0}
    world.ranks[0].end_serving()
    world.wait(0.1)
    assert world.core.mesh.with_work() == set()


def test_a_rank_is_shown_with_the_call_that_it_executes() -> None:
    served = PeerWork(PEER_RUNS.start, TITLE, (0,), 12.3)
    state = RankState(1, served.run, 0, 0, "time.sleep(60)", "", "cpu", 0, serves=served)
    assert describe_state(state) == f"running time.sleep(60), in {TITLE} for 12 s"


def test_a_rank_that_has_failed_is_resumed_once_others_have_left_the_call() -> None:
    world = World(2, settle_s=1.0).start()
    call = call_of(0, 1)
    for rank in world.ranks.values():
        rank.serve(call, is_reported=False)
    world.ranks[1].end_serving(ValueError("no"))
    for _ in range(20):
        world.deliver_down() or world.deliver_up()
        world.tick()
    assert world.core.mesh.held == {1: call.run}
    world.ranks[0]._say(call)
    world.wait(0.5)
    assert world.core.mesh.held == {1: call.run}
    world.ranks[0].end_serving(KeyError("no"))
    world.wait(0.5)
    assert world.core.mesh.held == {}
