"""What the controller decides, told what happened: no sockets, threads or clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.core import (
    ANSWER_S,
    REPORT_AFTER_S,
    Answer,
    Change,
    Core,
    Deliver,
    Effect,
    Finish,
    Send,
    Waits,
    encode_work,
)
from cellmesh.wire.framing import Parcel, at_rank_for_control, at_rank_for_work
from cellmesh.wire.messages import (
    Died,
    Display,
    Done,
    Failed,
    HostReport,
    Interrupt,
    LogText,
    MeshReady,
    Output,
    Pickled,
    Probe,
    Progress,
    PullNames,
    Ranked,
    RankInfo,
    RankState,
    ReadHost,
    ReadLog,
    Refused,
    Relay,
    Restart,
    Skipped,
    StartFailed,
    Stop,
    Stopped,
    StoreDied,
    Welcome,
)

FRAMES = encode_work(PullNames(1, "x"))
FAILED = Failed(1, "ValueError", "no", "Traceback", 3)


def infos(num_ranks: int) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(rank, 100 + rank, "host", "idle") for rank in range(num_ranks))


def ready_core(num_ranks: int = 4) -> Core:
    core = Core(num_ranks)
    core.receive(Parcel(Welcome(1, 2, "host")), 0.0)
    core.receive(Parcel(MeshReady(infos(num_ranks))), 0.0)
    assert core.state == "ready"
    return core


def hear(core: Core, ranks: Sequence[int], verb: Any, now: float = 0.0, buffers: Any = ()) -> list[Effect]:
    return core.receive(Parcel(Ranked(tuple(ranks), verb), buffers), now)


def of(kind: type, effects: Iterable[Effect]) -> list[Any]:
    return [effect for effect in effects if type(effect) is kind]


def sent(effects: Iterable[Effect]) -> list[Parcel[Any]]:
    return [effect.parcel for effect in of(Send, effects)]


def control_sent(effects: Iterable[Effect]) -> list[tuple[tuple[int, ...], Any]]:
    """(ranks, verb) of what goes to control threads."""
    found = []
    for relay, frames in sent(effects):
        assert relay.channel == "control"
        assert relay.run == -1
        found += [(relay.ranks, verb) for verb, _ in at_rank_for_control().decode(frames)]
    return found


def state_of(request: int, run: int, line: int = 5) -> RankState:
    return RankState(request, run, 3, line, "f", "all_reduce", "cpu", 0)


# ---- starting


def test_a_start_goes_from_connecting_to_ready() -> None:
    core = Core(2)
    assert core.state == "connecting"
    welcome = Welcome(1, 2, "host")
    assert core.receive(Parcel(welcome), 0.0) == [Change("starting", welcome)]
    progress = Progress("forking ranks", 0)
    assert core.receive(Parcel(progress), 0.0) == [Change("starting", progress)]
    ready = MeshReady(infos(2))
    assert core.receive(Parcel(ready), 0.0) == [Change("ready", ready)]
    assert core.ranks == infos(2)
    assert core.deadline() is None


@pytest.mark.parametrize("verb", [StartFailed("user", "no such module"), Refused("held by process 5")])
def test_a_start_that_fails_is_told_with_its_cause(verb: Any) -> None:
    core = Core(2)
    [change] = core.receive(Parcel(verb), 0.0)
    assert change.cause == verb
    assert change.state != "ready"
    [change] = core.receive(Parcel(Stopped("the start failed")), 0.0)
    assert change == Change("ended", Stopped("the start failed"))


@pytest.mark.parametrize("state", ["connecting", "starting", "restarting", "stopping", "ended"])
def test_work_for_a_mesh_that_is_not_ready_ends_at_once(state: str) -> None:
    core = Core(2)
    if state != "connecting":
        core = ready_core(2)
        if state == "starting":
            core = Core(2)
            core.receive(Parcel(Welcome(1, 2, "host")), 0.0)
        elif state == "restarting":
            core.restart({"dp": 2, "tp": 2})
        else:
            core.stop()
            if state == "ended":
                core.agent_ended("stopped")
    assert core.state == state
    effects = core.submit(1, (0, 1), FRAMES)
    assert not sent(effects)
    delivered = of(Deliver, effects)
    assert [deliver.ranks for deliver in delivered] == [(0, 1)]
    assert state in delivered[0].parcel.verb.reason
    assert effects[-1] == Finish(1)


# ---- runs


def test_work_is_sent_as_one_relay() -> None:
    [effect] = ready_core().submit(7, (0, 2), FRAMES)
    relay, frames = effect.parcel
    assert relay == Relay((0, 2), "work", 7, 1)
    assert at_rank_for_work().decode(frames) == [Parcel(PullNames(1, "x"))]


def test_work_for_control_threads_goes_there() -> None:
    [effect] = ready_core().submit(7, (1,), FRAMES, "control")
    assert effect.parcel.verb == Relay((1,), "control", 7, 1)


def test_a_run_finishes_when_its_last_rank_has_answered() -> None:
    core = ready_core()
    core.submit(1, (0, 1, 2), FRAMES)
    done = Done(1)
    assert hear(core, (0, 2), done) == [Deliver(1, (0, 2), Parcel(done))]
    assert hear(core, (1,), done) == [Deliver(1, (1,), Parcel(done)), Finish(1)]


def test_answers_bring_their_buffers() -> None:
    core = ready_core()
    core.submit(1, (0,), FRAMES)
    done = Done(1, Pickled(b"s", 1))
    effects = hear(core, (0,), done, buffers=(b"buffer",))
    assert effects == [Deliver(1, (0,), Parcel(done, (b"buffer",))), Finish(1)]


@pytest.mark.parametrize(
    "verb", [Output(1, "stdout", "x\n"), Skipped(1, 2, 3), Display(1, "display", b"{}", "id")]
)
def test_output_is_delivered_while_a_run_runs_and_after_it(verb: Any) -> None:
    core = ready_core()
    core.submit(1, (0,), FRAMES)
    assert hear(core, (0,), verb) == [Deliver(1, (0,), Parcel(verb))]
    hear(core, (0,), Done(1))
    assert hear(core, (0,), verb) == [Deliver(1, (0,), Parcel(verb))]


def test_an_answer_to_no_run_is_dropped() -> None:
    core = ready_core()
    assert hear(core, (0,), Done(99)) == []
    core.submit(1, (0,), FRAMES)
    hear(core, (0,), Done(1))
    assert hear(core, (0,), Done(1)) == []


def test_a_second_answer_of_a_rank_is_dropped() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    hear(core, (0,), Done(1))
    assert hear(core, (0,), Done(1)) == []
    assert hear(core, (0, 1), Done(1)) == [Deliver(1, (1,), Parcel(Done(1))), Finish(1)]


def test_runs_do_not_mix() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    core.submit(2, (0, 1), FRAMES)
    assert Finish(1) not in hear(core, (0,), Done(1))
    assert Finish(1) not in hear(core, (1,), Done(2))
    assert Finish(2) in hear(core, (0,), Done(2))
    assert Finish(1) in hear(core, (1,), Done(1))


def test_an_interrupt_goes_to_the_ranks_that_still_run() -> None:
    core = ready_core()
    core.submit(1, (0, 1, 3), FRAMES)
    hear(core, (1,), Done(1))
    assert control_sent(core.interrupt(1)) == [((0, 3), Interrupt(1))]
    hear(core, (0, 3), Done(1))
    assert core.interrupt(1) == []
    assert core.interrupt(99) == []


# ---- one rank fails while others run


def test_a_failure_is_delivered_at_once() -> None:
    core = ready_core()
    core.submit(1, (0, 1, 2, 3), FRAMES)
    assert hear(core, (3,), FAILED) == [Deliver(1, (3,), Parcel(FAILED))]


def test_after_a_failure_the_others_are_asked_where_they_are() -> None:
    core = ready_core()
    core.submit(1, (0, 1, 2, 3), FRAMES)
    hear(core, (3,), FAILED, now=10.0)
    assert core.deadline() == 10.0 + REPORT_AFTER_S
    assert core.tick(10.0) == []
    hear(core, (0,), Done(1), now=10.1)
    [(ranks, probe)] = control_sent(core.tick(10.0 + REPORT_AFTER_S))
    assert ranks == (1, 2)
    assert type(probe) is Probe
    assert core.deadline() == 10.0 + REPORT_AFTER_S + ANSWER_S
    assert hear(core, (1,), state_of(probe.request, 1)) == []
    assert hear(core, (2,), state_of(probe.request, 1, 6)) == [
        Waits(1, {1: state_of(probe.request, 1), 2: state_of(probe.request, 1, 6)})
    ]
    assert core.deadline() is None


def test_ranks_that_answer_soon_after_a_failure_are_not_asked() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    hear(core, (0,), FAILED, now=10.0)
    hear(core, (1,), Done(1), now=10.1)
    assert core.deadline() is None
    assert core.tick(20.0) == []


def test_ranks_that_do_not_say_where_they_are_are_left_out() -> None:
    core = ready_core()
    core.submit(1, (0, 1, 2), FRAMES)
    hear(core, (0,), FAILED, now=0.0)
    [(_, probe)] = control_sent(core.tick(REPORT_AFTER_S))
    hear(core, (1,), state_of(probe.request, 1))
    assert core.tick(REPORT_AFTER_S + ANSWER_S) == [Waits(1, {1: state_of(probe.request, 1)})]


def test_ranks_that_are_no_longer_in_the_run_are_left_out() -> None:
    core = ready_core()
    core.submit(1, (0, 1, 2), FRAMES)
    hear(core, (0,), FAILED, now=0.0)
    [(_, probe)] = control_sent(core.tick(REPORT_AFTER_S))
    hear(core, (1,), state_of(probe.request, 1))
    hear(core, (1,), Done(1))
    idle = RankState(probe.request, -1, 0, 0, "", "", "cpu", 0)
    assert hear(core, (2,), idle) == []


def test_nobody_is_told_of_a_run_that_has_ended() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    hear(core, (0,), FAILED, now=0.0)
    [(_, probe)] = control_sent(core.tick(REPORT_AFTER_S))
    hear(core, (1,), Done(1))
    assert hear(core, (1,), state_of(probe.request, 1)) == []
    assert core.tick(100.0) == []


# ---- deaths


def test_a_death_ends_the_ranks_part_in_every_run() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    core.submit(2, (1,), FRAMES)
    core.submit(3, (0,), FRAMES)
    died = Died(1, "killed by SIGKILL", "last words")
    effects = core.receive(Parcel(died), 0.0)
    assert of(Deliver, effects) == [Deliver(1, (1,), Parcel(died)), Deliver(2, (1,), Parcel(died))]
    assert of(Finish, effects) == [Finish(2)]
    assert of(Change, effects) == [Change("ready", died)]
    assert core.dead == {1: died}


def test_work_for_a_dead_rank_ends_there_and_runs_on_the_others() -> None:
    core = ready_core()
    died = Died(1, "killed by SIGKILL", "")
    core.receive(Parcel(died), 0.0)
    effects = core.submit(5, (0, 1), FRAMES)
    assert [parcel.verb.ranks for parcel in sent(effects)] == [(0,)]
    assert of(Deliver, effects) == [Deliver(5, (1,), Parcel(died))]
    assert of(Finish, effects) == []
    effects = core.submit(6, (1,), FRAMES)
    assert sent(effects) == []
    assert of(Finish, effects) == [Finish(6)]


def test_after_a_death_the_others_are_asked_where_they_are() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    core.receive(Parcel(Died(1, "killed", "")), 3.0)
    [(ranks, _)] = control_sent(core.tick(3.0 + REPORT_AFTER_S))
    assert ranks == (0,)


def test_the_death_of_the_store_is_told() -> None:
    core = ready_core()
    assert core.receive(Parcel(StoreDied("killed")), 0.0) == [Change("ready", StoreDied("killed"))]


# ---- questions


def test_states_are_answered_by_all_living_ranks() -> None:
    core = ready_core()
    core.receive(Parcel(Died(2, "killed", "")), 0.0)
    request, effects = core.ask_states((0, 1, 2), 0.0)
    assert control_sent(effects) == [((0, 1), Probe(request))]
    same = state_of(request, -1)
    assert hear(core, (0, 1), same) == [Answer(request, {0: same, 1: same})]
    assert core.deadline() is None


def test_states_that_do_not_come_are_not_waited_for() -> None:
    core = ready_core()
    request, _ = core.ask_states((0, 1), 10.0)
    hear(core, (1,), state_of(request, -1))
    assert core.deadline() == 10.0 + ANSWER_S
    assert core.tick(10.0 + ANSWER_S) == [Answer(request, {1: state_of(request, -1)})]
    assert hear(core, (0,), state_of(request, -1)) == []


def test_states_of_nobody_are_answered_at_once() -> None:
    core = ready_core()
    core.receive(Parcel(Died(2, "killed", "")), 0.0)
    request, effects = core.ask_states((2,), 0.0)
    assert effects == [Answer(request, {})]
    request, effects = Core(2).ask_states((0,), 0.0)
    assert effects == [Answer(request, {})]


def test_questions_to_the_agent_are_answered_by_it() -> None:
    core = ready_core()
    request, effects = core.ask_host()
    assert sent(effects) == [Parcel(ReadHost(request))]
    report = HostReport(request, infos(4))
    assert core.receive(Parcel(report), 0.0) == [Answer(request, report)]
    request, effects = core.ask_log(3, 1000)
    assert sent(effects) == [Parcel(ReadLog(request, 3, 1000))]
    text = LogText(request, "text", 0)
    assert core.receive(Parcel(text), 0.0) == [Answer(request, text)]


def test_requests_have_numbers_of_their_own() -> None:
    core = ready_core()
    requests = [core.ask_host()[0], core.ask_log(0, 1)[0], core.ask_states((0,), 0.0)[0], core.ask_host()[0]]
    assert len(set(requests)) == 4


# ---- restarting


def test_a_restart_ends_what_runs_and_asks_for_new_ranks() -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    hear(core, (0,), Done(1))
    effects = core.restart({"dp": 2, "tp": 2})
    assert [(deliver.ranks, deliver.parcel.verb.reason) for deliver in of(Deliver, effects)] == [
        ((1,), "was restarted")
    ]
    assert of(Finish, effects) == [Finish(1)]
    assert sent(effects) == [Parcel(Restart(("dp", "tp"), (2, 2)))]
    assert of(Change, effects) == [Change("restarting", None)]


def test_a_restarted_mesh_has_no_dead_and_takes_work() -> None:
    core = ready_core()
    core.receive(Parcel(Died(1, "killed", "")), 0.0)
    core.restart({"dp": 2, "tp": 2})
    core.receive(Parcel(Progress("process group", 1)), 0.0)
    assert core.state == "restarting"
    core.receive(Parcel(MeshReady(infos(4))), 0.0)
    assert core.state == "ready"
    assert core.dead == {}
    assert [parcel.verb.ranks for parcel in sent(core.submit(9, (0, 1), FRAMES))] == [(0, 1)]


def test_a_late_answer_from_before_a_restart_is_dropped() -> None:
    core = ready_core()
    core.submit(1, (0,), FRAMES)
    core.restart({"dp": 2, "tp": 2})
    assert hear(core, (0,), Done(1)) == []


# ---- ending


def test_stop_is_sent_once() -> None:
    core = ready_core()
    assert sent(core.stop()) == [Parcel(Stop())]
    assert core.stop() == []


@pytest.mark.parametrize("how", ["agent", "stopped"])
def test_the_end_ends_everything(how: str) -> None:
    core = ready_core()
    core.submit(1, (0, 1), FRAMES)
    request, _ = core.ask_states((0,), 0.0)
    if how == "agent":
        effects = core.agent_ended("its process ended")
    else:
        effects = core.receive(Parcel(Stopped("stopped")), 0.0)
    assert [deliver.ranks for deliver in of(Deliver, effects)] == [(0, 1)]
    assert of(Finish, effects) == [Finish(1)]
    assert of(Answer, effects) == [Answer(request, None)]
    assert [change.state for change in of(Change, effects)] == ["ended"]
    assert core.deadline() is None
    assert core.tick(1e6) == []


def test_the_end_comes_once() -> None:
    core = ready_core()
    core.receive(Parcel(Stopped("stopped")), 0.0)
    assert core.agent_ended("its process ended") == []


def test_what_has_ended_stays_ended() -> None:
    core = ready_core()
    core.agent_ended("its process ended")
    core.restart({"dp": 2, "tp": 2})
    assert core.state == "ended"
    core.receive(Parcel(MeshReady(infos(4))), 0.0)
    assert core.state == "ended"
    assert core.stop() == []


def test_a_mesh_that_is_stopping_does_not_become_ready() -> None:
    core = Core(2)
    core.receive(Parcel(Welcome(1, 2, "host")), 0.0)
    core.stop()
    core.receive(Parcel(MeshReady(infos(2))), 0.0)
    assert core.state == "stopping"


def test_questions_to_an_ended_mesh_are_answered_with_nothing() -> None:
    core = ready_core()
    core.agent_ended("its process ended")
    for request, effects in (core.ask_host(), core.ask_log(0, 10)):
        assert effects == [Answer(request, None)]


# ---- always

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "submit",
                "submit",
                "done",
                "done",
                "done",
                "failed",
                "died",
                "interrupt",
                "tick",
                "restart",
                "ready",
            ]
        ),
        st.integers(0, 3),
        st.integers(0, 2),
    ),
    max_size=40,
)


@given(EVENTS)
def test_every_run_hears_of_each_of_its_ranks_once_and_finishes_once(events: list[Any]) -> None:
    core, now, next_run = ready_core(), 0.0, 0
    ranks_of: dict[int, tuple[int, ...]] = {}
    told: dict[int, list[int]] = {}
    finished: list[int] = []

    def note(effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                assert effect.run not in finished
                told[effect.run] += effect.ranks
            elif isinstance(effect, Finish):
                finished.append(effect.run)

    for kind, rank, run in events:
        now += 0.2
        match kind:
            case "submit":
                ranks = tuple(range(rank + 1))
                ranks_of[next_run], told[next_run] = ranks, []
                note(core.submit(next_run, ranks, FRAMES))
                next_run += 1
            case "done":
                if run in ranks_of and rank in ranks_of[run]:
                    note(hear(core, (rank,), Done(run), now))
            case "failed":
                if run in ranks_of and rank in ranks_of[run]:
                    note(hear(core, (rank,), Failed(run, "E", "", "", 0), now))
            case "died":
                if core.state == "ready":
                    note(core.receive(Parcel(Died(rank, "killed", "")), now))
            case "interrupt":
                note(core.interrupt(run))
            case "tick":
                note(core.tick(now))
            case "restart":
                note(core.restart({"dp": 2, "tp": 2}))
            case "ready":
                note(core.receive(Parcel(MeshReady(infos(4))), now))
    note(core.agent_ended("the end"))
    assert sorted(finished) == sorted(ranks_of)
    assert {run: sorted(ranks) for run, ranks in told.items()} == {r: list(v) for r, v in ranks_of.items()}
