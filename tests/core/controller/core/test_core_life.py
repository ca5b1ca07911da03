"""The life of a mesh as its controller sees it, and every run's own end in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.core.core import Answer, Change, Core, Deliver, Effect, Finish
from cellmesh.wire.attach import Refused, Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import (
    Died,
    Done,
    Failed,
    MeshReady,
    Progress,
    Restart,
    StartFailed,
    Stop,
    Stopped,
)

from ....support.core_decisions import hear, infos, of, ready_core, sent
from ....support.runs import relay

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


@pytest.mark.parametrize(
    "verb", [StartFailed("user", "no such module"), Refused("held by process 5")]
)
def test_failed_start_is_reported_with_its_cause(verb: Any) -> None:
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
    effects = core.submit(relay(1, (0, 1)))
    assert not sent(effects)
    delivered = of(Deliver, effects)
    assert [deliver.ranks for deliver in delivered] == [(0, 1)]
    assert state in delivered[0].parcel.verb.reason
    assert effects[-1] == Finish(1)


# ---- restarting


def test_a_restart_ends_what_runs_and_asks_for_new_ranks() -> None:
    core = ready_core()
    core.submit(relay(1, (0, 1)))
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
    assert [parcel.verb.ranks for parcel in sent(core.submit(relay(9, (0, 1))))] == [(0, 1)]


def test_runs_sent_between_two_restarts_end() -> None:
    core = ready_core()
    core.restart()
    core.restart()
    core.receive(Parcel(MeshReady(infos(4))), 1.0)
    core.submit(relay(1, (0, 1)), now=1.0)
    effects = core.receive(Parcel(MeshReady(infos(4))), 2.0)
    assert of(Finish, effects) == [Finish(1)]
    assert sent(effects) == []
    assert core.state == "ready"


def test_a_late_answer_from_before_a_restart_is_dropped() -> None:
    core = ready_core()
    core.submit(relay(1, (0,)))
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
    core.submit(relay(1, (0, 1)))
    request, _ = core.ask_states((0,), 0.0)
    if how == "agent":
        effects = core.agent_ended("its process ended")
    else:
        effects = core.receive(Parcel(Stopped("stopped")), 0.0)
    assert [deliver.ranks for deliver in of(Deliver, effects)] == [(0, 1)]
    assert of(Finish, effects) == [Finish(1)]
    assert of(Answer, effects) == [Answer(request, {})]
    assert [change.state for change in of(Change, effects)] == ["ended"]
    assert core.deadline() is None
    assert core.tick(1e6) == []


def test_end_of_the_mesh_is_reported_once() -> None:
    core = ready_core()
    core.receive(Parcel(Stopped("stopped")), 0.0)
    assert core.agent_ended("its process ended") == []


def test_ended_mesh_stays_ended() -> None:
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
def test_every_run_gets_one_end_per_rank_and_finishes_once(events: list[Any]) -> None:
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
                note(core.submit(relay(next_run, ranks)))
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
    assert {run: sorted(ranks) for run, ranks in told.items()} == {
        r: list(v) for r, v in ranks_of.items()
    }
