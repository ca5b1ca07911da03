"""What the controller decides about runs, told what happened: no sockets, threads or clock."""

from __future__ import annotations

import pytest

from cellmesh.controller.core.core import Answer, Change, Core, Deliver, Finish, Waiting
from cellmesh.controller.core.runs import REPORT_AFTER_S
from cellmesh.wire.codec import Parcel, at_rank_for_work
from cellmesh.wire.messages import Channel, Died, Done, LogText, ReadLog, Relay, StoreDied
from cellmesh.wire.status import HostReport, Probe, ReadHost
from cellmesh.wire.values import PullNames

from ....support.core_decisions import (
    FAILED,
    control_sent,
    hear,
    infos,
    lose_rank,
    of,
    ready_core,
    running_core,
    sent,
    state_of,
)
from ....support.runs import relay

# ---- runs


@pytest.mark.parametrize("channel", ["work", "control"])
def test_work_is_sent_as_one_relay(channel: Channel) -> None:
    [effect] = ready_core().submit(relay(7, (0, 2), channel))
    order, frames = effect.parcel
    assert order == Relay((0, 2), channel, 7, 1)
    assert at_rank_for_work().decode(frames) == [Parcel(PullNames(7, "x"))]


def test_an_answer_to_no_run_and_a_second_one_are_dropped() -> None:
    core = running_core(4, (0, 1))
    assert hear(core, (0,), Done(99)) == []
    hear(core, (0,), Done(1))
    assert hear(core, (0,), Done(1)) == []
    assert hear(core, (0, 1), Done(1)) == [Deliver(1, (1,), Parcel(Done(1))), Finish(1)]
    assert hear(core, (1,), Done(1)) == []


# ---- one rank fails while others run


def test_ranks_that_answer_soon_after_a_failure_are_not_asked() -> None:
    core = running_core(4, (0, 1), on_error="wait")
    hear(core, (0,), FAILED, now=10.0)
    hear(core, (1,), Done(1), now=10.1)
    assert of(Waiting, core.tick(10.1 + REPORT_AFTER_S)) == []
    assert of(Waiting, core.tick(20.0)) == []


def test_ranks_that_are_no_longer_in_the_run_are_left_out() -> None:
    core = running_core(4, (0, 1, 2), on_error="wait")
    hear(core, (0,), FAILED, now=0.0)
    [(_, probe)] = control_sent(core.tick(REPORT_AFTER_S))
    hear(core, (1,), state_of(probe.request, 1))
    hear(core, (1,), Done(1))
    assert hear(core, (2,), state_of(probe.request, -1)) == []


def test_ended_run_gets_no_more_messages() -> None:
    core = running_core(4, (0, 1), on_error="wait")
    hear(core, (0,), FAILED, now=0.0)
    [(_, probe)] = control_sent(core.tick(REPORT_AFTER_S))
    hear(core, (1,), Done(1), now=REPORT_AFTER_S)
    assert hear(core, (1,), state_of(probe.request, 1)) == []
    assert of(Waiting, core.tick(100.0)) == []


# ---- deaths


def test_a_death_ends_the_ranks_part_in_every_run() -> None:
    core = running_core(4, (0, 1), (1,), (0,))
    died = Died(1, "killed by SIGKILL", "last words")
    effects = core.receive(Parcel(died), 0.0)
    first, second = Deliver(1, (1,), Parcel(died)), Deliver(2, (1,), Parcel(died), False)
    assert of(Deliver, effects) == [first, second]
    assert of(Finish, effects) == [Finish(2)]
    assert of(Change, effects) == [Change("ready", died)]
    assert core.dead == {1: died}


def test_work_for_a_dead_rank_ends_there_and_runs_on_the_others() -> None:
    core = ready_core()
    died = Died(1, "killed by SIGKILL", "")
    lose_rank(core, died)
    effects = core.submit(relay(5, (0, 1)))
    assert [parcel.verb.ranks for parcel in sent(effects)] == [(0,)]
    assert of(Deliver, effects) == [Deliver(5, (1,), Parcel(died))]
    assert of(Finish, effects) == []
    effects = core.submit(relay(6, (1,)))
    assert sent(effects) == []
    assert of(Finish, effects) == [Finish(6)]


@pytest.mark.parametrize("port", [0, 4321])
def test_store_death_is_reported(port: int) -> None:
    died = StoreDied("killed", port)
    assert of(Change, ready_core().receive(Parcel(died), 0.0)) == [Change("ready", died)]


# ---- questions


def test_states_of_no_ranks_are_answered_at_once() -> None:
    core = ready_core()
    core.receive(Parcel(Died(2, "killed", "")), 0.0)
    for asked in (core, Core(4)):
        request, effects = asked.ask((2,), Probe, 0.0)
        assert effects == [Answer(request, {})]


def test_questions_to_the_agent_are_answered_by_it() -> None:
    core = ready_core()
    request, effects = core.ask_agent(ReadHost)
    assert sent(effects) == [Parcel(ReadHost(request))]
    report = HostReport(request, infos(4))
    assert core.receive(Parcel(report), 0.0) == [Answer(request, report)]
    request, effects = core.ask_agent(lambda request: ReadLog(request, 3, 1000))
    assert sent(effects) == [Parcel(ReadLog(request, 3, 1000))]
    text = LogText(request, "text", 0)
    assert core.receive(Parcel(text), 0.0) == [Answer(request, text)]


def test_requests_have_numbers_of_their_own() -> None:
    core = ready_core()
    asked = core.ask_agent(ReadHost), core.ask((0,), Probe, 0.0), core.ask_agent(ReadHost)
    assert len({request for request, _ in asked}) == 3
