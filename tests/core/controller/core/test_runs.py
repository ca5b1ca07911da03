"""Runs in flight: who is released and when, who is killed, and what is shown of those that take
long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from cellmesh.controller.core.core import Core, Deliver, Finish, Judge, Waiting, Watch
from cellmesh.controller.core.mesh_state import HostLost
from cellmesh.controller.core.runs import ESCALATE_S, REPORT_AFTER_S, STOP_S
from cellmesh.controller.core.sweeps import SWEEP_S, WATCH_AFTER_S
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Begun, GroupCount, InFlight
from cellmesh.wire.messages import Died, Done, Failing, Interrupt, Kill, Release
from cellmesh.wire.status import Probe, RankState
from cellmesh.wire.user_code import InputCancelled, InputReply, InputRequest

from ....support.core_decisions import (
    FAILED,
    counted,
    failed,
    heal_all,
    hear,
    of,
    only,
    ready_core,
    running_core,
    sent,
    stop,
    told,
)
from ....support.runs import relay


def verbs(kind: type, effects: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(ranks, verb) for ranks, verb in told(effects) if type(verb) is kind]


def ticks(core: Core, end: float) -> Iterator[tuple[float, list[Any]]]:
    """Let time pass; (time, effects) of every tick that has any."""
    while (at := core.deadline()) is not None and at <= end:
        effects = core.tick(at)
        assert effects or core.deadline() != at
        if effects:
            yield at, effects


def releases(core: Core, end: float) -> list[tuple[float, tuple[int, ...]]]:
    """(time, ranks) of each release until then."""
    return [(at, ranks) for at, effects in ticks(core, end) for ranks, _ in verbs(Release, effects)]


def running(request: int, run: int = 1, counts: Any = ()) -> RankState:
    return RankState(request, run, 1, 5, "f", "", "cpu", 0, counts=counts)


def waiting_in(request: int, run: int, number: int, waited_s: float = 9.0) -> RankState:
    """What a rank says that waits in its so-manieth collective."""
    counts = counted(number)
    return RankState(
        request, run, 1, 5, "f", "all_reduce", "cpu", 0, "world", waited_s, False, False, counts
    )


def idle(request: int, number: int) -> RankState:
    return RankState(request, -1, 0, 0, "", "", "cpu", 0, counts=counted(number))


# ---- release


def test_the_others_are_released_when_they_have_had_time_to_settle() -> None:
    core = ready_core(settle_s=2.0)
    core.submit(relay(1, (0, 1, 2, 3)), now=10.0)
    hear(core, (3,), FAILED, now=11.0)
    hear(core, (0,), FAILED, now=12.5)
    hear(core, (2,), Done(1), now=12.9)
    assert releases(core, 30.0) == [(13.0, (1,))]


def test_lost_host_ends_the_runs_of_its_ranks_at_once_and_is_one_event() -> None:
    core = ready_core(settle_s=1.0)
    core.submit(relay(1, (0, 1, 2, 3)), now=10.0)
    core.submit(relay(2, (2, 3)), now=10.0)
    effects = core.receive(Parcel(HostLost("b", (2, 3), "killed")), 10.0)
    ended = [(each.run, each.ranks, each.has_begun) for each in of(Deliver, effects)]
    assert ended == [(1, (2, 3), True), (2, (2, 3), False)]
    (reason,) = {each.parcel.verb.reason for each in of(Deliver, effects)}
    assert reason == "was on b, which is lost: killed"
    assert core.dead.keys() == {2, 3} == {core.dead[rank].rank for rank in (2, 3)}


def test_a_death_is_a_failure() -> None:
    core = ready_core(settle_s=1.0)
    core.submit(relay(1, (0, 1)), now=10.0)
    core.receive(Parcel(Died(0, "was killed", "")), 10.0)
    assert verbs(Release, core.tick(10.9)) == []
    assert verbs(Release, core.tick(11.0)) == [((1,), Release(1))]


def test_the_others_have_their_time_from_when_a_rank_raises_not_from_its_description() -> None:
    core = ready_core(settle_s=1.0)
    core.submit(relay(1, (0, 1, 2)), now=10.0)
    assert hear(core, (0, 2), Failing(1), now=11.0) == []
    hear(core, (2,), FAILED, now=11.5)
    assert releases(core, 30.0) == [(12.0, (1,))]  # rank 0 is being described: no release
    assert of(Finish, hear(core, (0, 1), FAILED, now=40.0))
    assert hear(core, (0,), Failing(1), now=41.0) == []  # of a run that has ended


def test_on_error_wait_reports_no_rank_that_has_raised() -> None:
    core = running_core(4, (0, 1), on_error="wait")
    hear(core, (0,), Failing(1), now=0.0)
    assert only(Probe, core.tick(REPORT_AFTER_S))[0] == (1,)


def test_rank_is_not_released_twice() -> None:
    core = running_core(4, (0, 1, 2), settle_s=1.0)
    hear(core, (0,), FAILED, now=0.0)
    assert verbs(Release, core.tick(1.0)) == [((1, 2), Release(1))]
    hear(core, (1,), FAILED, now=1.1)
    assert releases(core, 20.0) == []


def test_on_error_wait_releases_no_rank() -> None:
    core = running_core(4, (0, 1), on_error="wait")
    hear(core, (0,), FAILED, now=0.0)
    _, probe = only(Probe, core.tick(REPORT_AFTER_S))
    state = waiting_in(probe.request, 1, 1)
    assert of(Waiting, hear(core, (1,), state, REPORT_AFTER_S)) == [Waiting(1, {1: state})]
    assert releases(core, 30.0) == []


def test_no_rank_is_released_while_a_rank_asks() -> None:
    core = running_core(4, (0, 1, 2), settle_s=1.0)
    hear(core, (1,), InputRequest(1, 77, "(Pdb) "), now=0.5)
    hear(core, (0,), FAILED, now=1.0)
    assert releases(core, 20.0) == []
    assert told(core.reply({1: 77}, "q")) == [((1,), InputReply(77, "q"))]
    assert [ranks for _, ranks in releases(core, 25.0)] == [(1, 2)]


def test_a_question_that_is_withdrawn_no_longer_keeps_the_others() -> None:
    core = running_core(4, (0, 1), settle_s=1.0)
    hear(core, (1,), InputRequest(1, 77, "? "), now=0.0)
    hear(core, (0,), FAILED, now=0.0)
    hear(core, (1,), InputCancelled(1, 77), now=3.0)
    assert [ranks for _, ranks in releases(core, 9.0)] == [(1,)]
    assert core.reply({1: 77}, "late") == []


def test_core_has_no_deadline_where_nothing_settles() -> None:
    core = running_core(4, (0, 1), settle_s=0.0)
    hear(core, (1,), InputRequest(1, 77, "? "), now=0.0)
    hear(core, (0,), FAILED, now=0.0)
    core.tick(0.0)
    assert core.deadline() is not None
    assert core.deadline() >= SWEEP_S


def test_interrupted_rank_may_end_as_its_code_decides() -> None:
    core = running_core(4, (0, 1), settle_s=1.0)
    core.interrupt([1], 0.0)
    hear(core, (0,), failed(1, "KeyboardInterrupt"), now=0.1)
    assert releases(core, 20.0) == []


# ---- nobody failed, and yet they wait


def sweep(core: Core, now: float) -> tuple[Any, list[Any]]:
    """Until the next look at all ranks: its time, their numbers, and that of the request."""
    for at, effects in ticks(core, now):
        for ranks, probe in verbs(Probe, effects):
            return at, [ranks, probe.request]
    raise AssertionError("no rank is looked at")


@pytest.mark.parametrize("is_awaited", [False, True])
def test_rank_waiting_for_a_rank_that_ended_well_is_released(is_awaited: bool) -> None:
    core = running_core(2, (0, 1))
    if is_awaited:
        core.wait_for(1)
    hear(core, (1,), Done(1, None, counted(2)), now=0.1)
    at, [ranks, request] = sweep(core, 5.0)
    assert ranks == (0, 1)
    assert at >= 1.1
    hear(core, (1,), idle(request, 2), at)
    effects = hear(core, (0,), waiting_in(request, 1, 3), at)
    assert told(effects) == [((0,), Release(1))]


def test_computing_rank_is_not_released() -> None:
    core = running_core(2, (0, 1))
    hear(core, (1,), Done(1), now=0.1)
    at, [_, request] = sweep(core, 5.0)
    hear(core, (1,), idle(request, 2), at)
    assert hear(core, (0,), running(request, counts=counted(2)), at) == []


def test_state_older_than_a_ranks_end_of_run_is_ignored() -> None:
    core = running_core(3, (0, 1, 2))
    hear(core, (2,), Done(1, None, counted(3)), now=0.1)
    at, [_, request] = sweep(core, 5.0)
    hear(core, (2,), idle(request, 3), at)
    hear(core, (1,), running(request, counts=counted(2)), at)
    hear(core, (1,), Done(1, None, counted(3)), now=at)
    assert told(hear(core, (0,), waiting_in(request, 1, 3), at)) == []


@pytest.mark.parametrize("submitted", ["before", "while they are asked"])
def test_rank_with_more_work_may_still_join(submitted: str) -> None:
    core = running_core(2, (0, 1))
    if submitted == "before":
        core.submit(relay(2, (0, 1)))
    hear(core, (1,), Done(1), now=0.1)
    at, [_, request] = sweep(core, 5.0)
    if submitted != "before":
        core.submit(relay(2, (1,)), now=at)
        hear(core, (1,), Done(2), now=at)
    hear(core, (1,), idle(request, 2), at)
    assert told(hear(core, (0,), waiting_in(request, 1, 3), at)) == []


def test_rank_that_holds_back_its_work_will_not_join() -> None:
    core = running_core(3, (0, 1, 2), (0, 1), settle_s=1.0)
    core.interrupt([1], 0.0)  # the others are not released for the failure itself
    hear(core, (1,), FAILED, now=0.1)
    at, [_, request] = sweep(core, 5.0)
    hear(core, (1,), idle(request, 2), at)
    hear(core, (2,), running(request, counts=counted(2)), at)
    assert told(hear(core, (0,), waiting_in(request, 1, 3), at)) == [((0,), Release(1))]


def test_rank_that_has_not_begun_the_run_will_join() -> None:
    core = running_core(4, (0, 1), (0, 2), settle_s=1.0)
    core.wait_for(2)
    hear(core, (0,), FAILED, now=0.0)  # and holds run 2 back until rank 1 has ended run 1
    hear(core, (1,), InputRequest(1, 5, "? "), now=0.0)
    at, [_, request] = sweep(core, 5.0)
    for rank in (0, 1, 3):
        assert hear(core, (rank,), idle(request, 0), at) == []
    counts = counted(1, (0, 2), "a")
    waits = RankState(request, 2, 1, 5, "f", "all_reduce", "cpu", 0, "a", 9.0, False, False, counts)
    assert told(hear(core, (2,), waits, at)) == []


def test_awaited_rank_that_needs_idle_ranks_is_released() -> None:
    core = running_core(3, (0, 1))
    core.wait_for(1)
    at, [ranks, request] = sweep(core, 5.0)
    assert ranks == (0, 1, 2)
    hear(core, (2,), idle(request, 0), at)
    hear(core, (0,), waiting_in(request, 1, 1), at)
    assert told(hear(core, (1,), waiting_in(request, 1, 1), at)) == [((0, 1), Release(1))]


def in_another(request: int, name: str) -> RankState:
    counts = (GroupCount("0", (), 3, recent=(Begun(3, name, 4, "float32"),)),)
    flight = (InFlight("0", name, 3),)
    return RankState(
        request, 1, 1, 5, "f", name, "cpu", 0, "0", 9.0, counts=counts, in_flight=flight
    )


@pytest.mark.parametrize(("on_error", "is_released"), [("release", True), ("wait", False)])
def test_ranks_whose_operations_cannot_meet_are_released_with_the_reason(
    on_error: str, is_released: bool
) -> None:
    core = running_core(2, (0, 1), on_error=on_error)
    at, [_, request] = sweep(core, 5.0)
    assert at == pytest.approx(1.0)
    assert hear(core, (0,), in_another(request, "all_reduce"), at) == []
    effects = hear(core, (1,), in_another(request, "barrier"), at)
    [verdict] = of(Judge, effects)
    assert verdict.verdict.startswith("these cannot meet: ")
    assert told(effects) == ([((0, 1), Release(1))] if is_released else [])
    if not is_released:  # it is not said twice, and not left there
        at, [_, request] = sweep(core, 9.0)
        hear(core, (0,), in_another(request, "all_reduce"), at)
        assert of(Judge, hear(core, (1,), in_another(request, "barrier"), at)) == []
        at, [_, request] = sweep(core, 12.0)
        hear(core, (0,), in_another(request, "all_reduce"), at)
        assert of(Judge, hear(core, (1,), in_another(request, "all_reduce"), at)) == [Judge(1, "")]


def test_ranks_that_cannot_meet_are_not_released_while_one_asks() -> None:
    core = running_core(3, (0, 1, 2))
    at, [_, request] = sweep(core, 5.0)
    hear(core, (2,), InputRequest(1, 7, "(Pdb) "), at)
    hear(core, (2,), running(request, counts=counted(0)), at)
    hear(core, (0,), in_another(request, "all_reduce"), at)
    assert told(hear(core, (1,), in_another(request, "barrier"), at)) == []


def test_background_run_may_wait_for_a_later_run() -> None:
    core = running_core(3, (0, 1))
    assert not any(verbs(Probe, effects) for at, effects in ticks(core, WATCH_AFTER_S - 0.1))


def test_waiting_rank_is_not_released_while_another_asks() -> None:
    core = running_core(3, (0, 1, 2))
    hear(core, (2,), Done(1), now=0.1)
    hear(core, (1,), InputRequest(1, 7, "(Pdb) "), now=0.1)
    assert not any(verbs(Probe, effects) for _, effects in ticks(core, WATCH_AFTER_S - 0.1))


# ---- interrupts


def kills(effects: Any) -> list[Kill]:
    return [parcel.verb for parcel in sent(effects) if type(parcel.verb) is Kill]


def test_second_interrupt_kills_ranks_that_have_not_stopped() -> None:
    core = running_core(4, (0, 1, 2), settle_s=1.0)
    assert told(stop(core, 1, (0, 1, 2), 10.0)) == [((0, 1, 2), Interrupt(1, True))]
    assert core.interrupt([1], 10.2) == []
    hear(core, (0,), failed(1, "KeyboardInterrupt"), now=10.5)
    found = [(at, kill) for at, effects in ticks(core, 10.5 + STOP_S) for kill in kills(effects)]
    assert found == [(10.0 + STOP_S, Kill((1, 2)))]


def test_second_interrupt_kills_at_once_ranks_that_had_time_to_stop() -> None:
    core = running_core(4, (0,))
    stop(core, 1, (0,), 10.0)
    assert core.interrupt([1], 13.0) == []
    assert core.deadline() <= 13.0
    assert kills(core.tick(13.0)) == [Kill((0,))]


def test_a_late_second_interrupt_is_a_first_one() -> None:
    core = running_core(4, (0,))
    stop(core, 1, (0,), 10.0)
    late = 10.0 + ESCALATE_S + 0.1
    assert told(core.interrupt([1], late)) == [((0,), Interrupt(1))]
    assert kills(core.tick(late + 2)) == []


def test_a_third_interrupt_kills_again_and_no_earlier() -> None:
    core = running_core(4, (0,))
    for now in (10.0, 10.1, 10.2):
        core.interrupt([1], now)
    assert kills(core.tick(9.9 + STOP_S)) == []
    assert kills(core.tick(10.0 + STOP_S)) == [Kill((0,))]
    core.interrupt([1], 13.0)
    assert kills(core.tick(13.0)) == [Kill((0,))]


def test_rank_with_the_run_queued_is_not_killed() -> None:
    core = running_core(4, (0,), (0, 1))
    core.interrupt([2], 10.0)
    core.interrupt([2], 10.1)
    assert kills(core.tick(10.0 + STOP_S)) == [Kill((1,))]


def test_killed_rank_is_reported_and_ends_the_run() -> None:
    core = running_core(4, (0, 1))
    hear(core, (1,), Done(1), now=9.0)
    core.interrupt([1], 10.0)
    core.interrupt([1], 10.1)
    core.tick(10.0 + STOP_S)
    died = Parcel(Died(0, "did not stop", ""))
    effects = core.receive(died, 10.1 + STOP_S)
    assert of(Deliver, effects) == [Deliver(1, (0,), died)]
    assert of(Finish, effects) == [Finish(1)]


def test_a_run_that_waits_for_the_mesh_to_be_calm_is_stopped_at_once() -> None:
    core = running_core(2, (0, 1))
    hear(core, (0, 1), FAILED)
    assert told(core.submit(relay(2, (0, 1)))) == []
    effects = core.interrupt([2], 0.1)
    [deliver] = of(Deliver, effects)
    assert (deliver.ranks, deliver.parcel.verb.type_name) == ((0, 1), "KeyboardInterrupt")
    assert of(Finish, effects) == [Finish(2)]
    assert told(effects) == []


def test_a_run_that_waits_behind_another_is_stopped_at_once_where_it_is_known_to_wait() -> None:
    core = running_core(3, (0, 1, 2), (0, 1, 2))
    effects = core.interrupt([2], 1.0)
    assert verbs(Interrupt, effects) == [((0, 1, 2), Interrupt(2))]
    _, probe = only(Probe, effects)
    hear(core, (0,), running(probe.request, 1), 1.0)
    hear(core, (1,), running(probe.request, 2), 1.0)  # it has just begun
    effects = hear(core, (2,), running(probe.request, -1), 1.0)  # or is about to answer
    assert [deliver.ranks for deliver in of(Deliver, effects)] == [(0,)]
    hear(core, (0, 1, 2), Done(1), 1.1)
    effects = hear(core, (1, 2), failed(2, "KeyboardInterrupt"), 1.2)
    assert of(Finish, effects) == [Finish(2)]


def test_a_run_that_is_held_back_is_stopped_at_once() -> None:
    core = running_core(2, (0, 1), (0,), on_error="wait")
    hear(core, (0,), FAILED)
    assert of(Finish, core.interrupt([2], 1.0)) == [Finish(2)]


# ---- runs for control threads


def test_failure_in_a_control_thread_holds_no_rank_back() -> None:
    core = running_core(2, (0, 1))
    core.submit(relay(2, (0, 1), "control"))
    effects = hear(core, (0,), failed(2), now=0.1) + hear(core, (1,), failed(2), now=0.2)
    assert of(Finish, effects) == [Finish(2)]
    assert told(effects) == []
    assert releases(core, 3.0) == []


def test_a_control_thread_is_not_released() -> None:
    core = ready_core(2)
    core.submit(relay(1, (0, 1), "control"))
    hear(core, (0,), failed(1, "NameError", "x"), now=0.1)
    assert not any(told(effects) for _, effects in ticks(core, 20.0))


# ---- runs that take long


def test_a_run_that_takes_long_is_shown_every_second() -> None:
    core, times, now = running_core(2, (0, 1)), [], 0.0
    while now < 8.5:
        now = core.deadline()
        for ranks, probe in verbs(Probe, core.tick(now)):
            for rank in ranks:
                for watch in of(Watch, hear(core, (rank,), running(probe.request), now)):
                    assert (watch.run, set(watch.states)) == (1, {0, 1})
                    times.append(now)
    assert times[0] == pytest.approx(WATCH_AFTER_S, abs=SWEEP_S)
    assert len(times) == 4
    assert all(b - a == pytest.approx(1.0, abs=SWEEP_S) for a, b in itertools.pairwise(times))


def test_rank_without_an_answer_is_missing_in_the_status_line() -> None:
    core = running_core(2, (0, 1), settle_s=WATCH_AFTER_S)
    at, [_, request] = sweep(core, 9.0)
    state = running(request)
    hear(core, (0,), state, at)
    assert of(Watch, core.tick(at + 1.0)) == [Watch(1, {0: state})]


def test_a_run_that_has_waited_for_calm_is_given_its_time_from_then_on() -> None:
    core = running_core(3, (0, 1), settle_s=1.0)
    effects = hear(core, (0, 1), FAILED, now=0.0)
    core.submit(relay(2, (0, 1, 2)), now=0.1)
    effects += core.receive(Parcel(Died(2, "was killed", "")), 0.2) + core.tick(5.0)
    assert verbs(Release, effects) == []
    effects = heal_all(core, effects, 5.0)
    [order] = [parcel.verb for parcel in sent(effects) if parcel.verb.run == 2]
    assert order.ranks == (0, 1)
    assert releases(core, 20.0) == [(pytest.approx(6.1), (0, 1))]
