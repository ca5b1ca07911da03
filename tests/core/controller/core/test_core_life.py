"""The life of a mesh as its controller sees it, and every run's own end in it."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.core import Answer, Change, Core, Deliver, Finish
from cellmesh.wire.attach import Refused, Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import MeshReady, StartFailed, Stop, Stopped
from cellmesh.wire.status import Probe, ReadHost

from ....support.core_decisions import infos, of, ready_core, running_core, sent
from ....support.runs import relay

# ---- starting


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


def core_that_is(state: str) -> Core:
    core = Core(2) if state in ("connecting", "starting") else ready_core(2)
    if state == "starting":
        core.receive(Parcel(Welcome(1, 2, "host")), 0.0)
    elif state == "restarting":
        core.restart({"dp": 2, "tp": 2})
    elif state in ("stopping", "ended"):
        core.stop()
        if state == "ended":
            core.agent_ended("stopped")
    assert core.state == state
    return core


@pytest.mark.parametrize("state", ["connecting", "starting", "restarting", "stopping", "ended"])
def test_work_for_a_mesh_that_is_not_ready_ends_at_once(state: str) -> None:
    effects = core_that_is(state).submit(relay(1, (0, 1)))
    assert not sent(effects)
    [deliver] = of(Deliver, effects)
    assert deliver.ranks == (0, 1)
    assert state in deliver.parcel.verb.reason
    assert effects[-1] == Finish(1)


# ---- restarting


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


# ---- ending


def test_stop_is_sent_once() -> None:
    core = ready_core()
    assert sent(core.stop()) == [Parcel(Stop())]
    assert core.stop() == []


@pytest.mark.parametrize("how", ["agent", "stopped"])
def test_the_end_ends_everything_and_is_reported_once(how: str) -> None:
    core = running_core(4, (0, 1))
    request, _ = core.ask((0,), Probe, 0.0)
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
    assert core.agent_ended("its process ended") == []


@pytest.mark.parametrize("state", ["stopping", "ended"])
def test_a_mesh_that_stops_does_not_become_ready_again(state: str) -> None:
    core = core_that_is(state)
    if state == "ended":
        core.restart({"dp": 2, "tp": 2})
    core.receive(Parcel(MeshReady(infos(2))), 0.0)
    assert core.state == state
    assert core.stop() == []


def test_questions_to_an_ended_mesh_are_answered_with_nothing() -> None:
    request, effects = core_that_is("ended").ask_agent(ReadHost)
    assert effects == [Answer(request, None)]
