"""Many agents look like one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cellmesh.controller.core.mesh_state import HostLost, Returned
from cellmesh.controller.session.hosts.fan import Fan, Routed
from cellmesh.wire.attach import Detach, Detached, Refused, RunInfo, Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import AgentAddress
from cellmesh.wire.messages import (
    AgentFault,
    Died,
    Kill,
    LogText,
    MakeStore,
    MeshReady,
    Progress,
    ReadLog,
    Relay,
    Resize,
    Respawn,
    Respawned,
    RespawnFailed,
    Restart,
    StartFailed,
    Stop,
    Stopped,
    StoreDied,
    StoreUp,
    UseStore,
)
from cellmesh.wire.status import HostReport, RankInfo, ReadHost

AGENTS = [
    AgentAddress("a", "tcp://10.0.0.1:1000", "key-a", 0, 2),
    AgentAddress("b", "tcp://10.0.0.2:1000", "key-b", 2, 1),
    AgentAddress("c", "tcp://10.0.0.3:1000", "key-c", 3, 2),
]


def info(rank: int) -> RankInfo:
    return RankInfo(rank, 100 + rank, "host", "idle")


def welcome(**fields: Any) -> Welcome:
    return Welcome(protocol=1, agent_pid=1, host="x", **fields)


def verbs(routed: Routed) -> list[Any]:
    return [parcel.verb for parcel in routed.up]


def downs(routed: Routed) -> list[tuple[int, Any]]:
    return [(index, parcel.verb) for index, parcel in routed.down]


@pytest.fixture
def fan() -> Fan:
    """A fan whose agents have all welcomed the controller."""
    fan = Fan(AGENTS)
    for index in range(3):
        fan.join(index, Parcel(welcome()))
    return fan


@pytest.fixture
def ready(fan: Fan) -> Fan:
    for index, agent in enumerate(AGENTS):
        fan.join(index, Parcel(MeshReady(tuple(map(info, agent.ranks)), 77 if index == 0 else 0)))
    return fan


def test_each_agent_gets_what_concerns_its_ranks(fan: Fan) -> None:
    order = Parcel(Relay((1, 3, 4), "work", 5, 1), (b"cell",))
    routed = fan.split(order)
    assert downs(routed) == [(0, Relay((1,), "work", 5, 1)), (2, Relay((3, 4), "work", 5, 1))]
    assert all(parcel.buffers == (b"cell",) for _, parcel in routed.down)
    assert downs(fan.split(Parcel(Kill((2,))))) == [(1, Kill((2,)))]
    assert downs(fan.split(Parcel(ReadLog(9, 4, 100)))) == [(2, ReadLog(9, 4, 100))]
    assert downs(fan.split(Parcel(Stop()))) == [(index, Stop()) for index in range(3)]


def test_welcomes_are_joined_before_anything_else_is_heard() -> None:
    fan = Fan(AGENTS)
    early = Parcel(Died(0, "was killed", ""))
    assert verbs(fan.join(0, Parcel(welcome(next_run=4, runs=(RunInfo(3, (0,), "x"),))))) == []
    assert verbs(fan.join(0, early)) == []
    fan.join(1, Parcel(welcome(next_run=7, away_s=2.0)))
    last = welcome(next_run=1, runs=(RunInfo(3, (3, 4), "x"), RunInfo(5, (4,), "y")))
    joined, died = verbs(fan.join(2, Parcel(last)))
    assert (joined.next_run, joined.away_s) == (7, 2.0)
    assert joined.runs == (RunInfo(3, (0, 3, 4), "x"), RunInfo(5, (4,), "y"))
    assert died == early.verb


def test_progress_is_that_of_the_slowest_host(fan: Fan) -> None:
    fan.join(0, Parcel(Progress("process group", 2)))
    fan.join(1, Parcel(Progress("forking ranks", 0)))
    (progress,) = verbs(fan.join(2, Parcel(Progress("process group", 1))))
    assert progress == Progress("forking ranks", 3)


def test_mesh_is_ready_once_every_host_is(fan: Fan) -> None:
    assert verbs(fan.join(2, Parcel(MeshReady((info(3), info(4)))))) == []
    assert verbs(fan.join(0, Parcel(MeshReady((info(0), info(1)), 77)))) == []
    (ready,) = verbs(fan.join(1, Parcel(MeshReady((info(2),)))))
    assert ready == MeshReady(tuple(map(info, range(5))), 77)


def test_restarted_mesh_is_ready_once_every_host_is_again(ready: Fan) -> None:
    assert len(ready.split(Parcel(Restart())).down) == 3
    assert verbs(ready.join(0, Parcel(MeshReady((info(0), info(1)), 77)))) == []


def test_other_hosts_hear_where_the_store_is(fan: Fan) -> None:
    use = UseStore("10.0.0.1", 99)
    assert downs(fan.join(0, Parcel(StoreUp(99)))) == [(1, use), (2, use)]
    died = StoreDied("was killed", 98)
    routed = fan.join(0, Parcel(died))
    assert verbs(routed) == [died]
    assert downs(routed) == [(1, UseStore("10.0.0.1", 98)), (2, UseStore("10.0.0.1", 98))]
    assert downs(fan.join(0, Parcel(StoreDied("was killed", 0)))) == []


def test_first_failed_start_is_reported_with_its_host(fan: Fan) -> None:
    first = fan.join(1, Parcel(StartFailed("user", "no module x")))
    assert verbs(first) == [StartFailed("user", "on b: no module x")]
    assert verbs(fan.join(2, Parcel(StartFailed("user", "no module x")))) == []


def test_failed_start_of_one_host_ends_the_others(fan: Fan) -> None:
    fan.join(1, Parcel(StartFailed("user", "no module x")))
    routed = fan.join(1, Parcel(Stopped("the start failed")))
    assert verbs(routed) == [Stopped("the start failed")]
    assert downs(routed) == [(0, Stop()), (2, Stop())]


def test_faults_name_their_host(fan: Fan) -> None:
    assert verbs(fan.join(2, Parcel(AgentFault("oops")))) == [AgentFault("on c: oops")]


def test_reports_are_joined(fan: Fan) -> None:
    fan.split(Parcel(ReadHost(4)))
    fan.join(2, Parcel(HostReport(4, (info(3), info(4)), 2.0)))
    fan.join(0, Parcel(HostReport(4, (info(0), info(1)), 1.0)))
    (report,) = verbs(fan.join(1, Parcel(HostReport(4, (info(2),), 3.0))))
    assert report == HostReport(4, tuple(map(info, range(5))), 3.0)


def test_question_is_answered_without_a_host_that_is_not_heard(ready: Fan) -> None:
    ready.split(Parcel(ReadHost(4)))
    ready.join(0, Parcel(HostReport(4, (info(0), info(1)), 1.0)))
    ready.join(2, Parcel(HostReport(4, (info(3), info(4)), 2.0)))
    (report,) = verbs(ready.note_heard(1, False))
    assert [rank.is_heard for rank in report.ranks] == [True, True, False, True, True]
    assert report.ranks[2] == msgspec.structs.replace(info(2), is_heard=False)
    ready.note_heard(1, True)
    ready.split(Parcel(ReadHost(5)))
    for index, agent in enumerate(AGENTS):
        said = verbs(ready.join(index, Parcel(HostReport(5, tuple(map(info, agent.ranks))))))
    assert said == [HostReport(5, tuple(map(info, range(5))))]


def test_log_on_a_host_that_is_not_heard_is_not_waited_for(ready: Fan) -> None:
    assert downs(ready.split(Parcel(ReadLog(7, 2, 100)))) == [(1, ReadLog(7, 2, 100))]
    said = LogText(7, "it cannot be read: b is not heard", 0, "its log on b")
    ready.note_heard(1, False)
    assert verbs(ready.split(Parcel(ReadLog(7, 2, 100)))) == [said]
    ready.lose(1, "cut")
    assert verbs(ready.split(Parcel(ReadLog(7, 2, 100)))) == [said]


def test_host_in_place_of_a_silent_one_that_left_is_asked(ready: Fan) -> None:
    ready.note_heard(2, False)
    resize = Resize(1, (2, 1), ("dp",), (3,))
    ready.split(Parcel(resize))
    ready.add(AGENTS[2])
    ready.join(2, Parcel(MeshReady(())))
    ready.split(Parcel(ReadHost(4)))
    for index in (0, 1):
        said = verbs(ready.join(index, Parcel(HostReport(4, (info(index),)))))
        assert said == []
    (report,) = verbs(ready.join(2, Parcel(HostReport(4, (info(3),)))))
    assert [rank.rank for rank in report.ranks] == [0, 1, 3]


def test_store_is_made_by_a_host_that_stays(ready: Fan) -> None:
    ready.join(0, Parcel(StoreUp(77)))
    ready.note_heard(1, False)
    routed = ready.lose(0, "cut")
    assert downs(routed) == [(2, MakeStore())]  # the other one is not heard
    ready.note_heard(1, True)
    assert downs(ready.lose(2, "cut, too")) == [(1, MakeStore())]
    assert downs(ready.replace(0, AGENTS[0])) == []  # until there is a store
    told = ready.join(1, Parcel(StoreUp(88)))
    assert downs(told) == [(0, UseStore("10.0.0.2", 88))]


def test_resize_that_leaves_the_store_out_has_it_made_again(ready: Fan) -> None:
    ready.join(1, Parcel(StoreUp(88)))
    resize = Resize(1, (2,), ("dp",), (2,))
    assert downs(ready.split(Parcel(resize))) == [(0, resize), (0, MakeStore())]
    assert downs(ready.join(0, Parcel(StoreUp(99)))) == []
    assert downs(ready.split(Parcel(resize))) == [(0, resize)]


def test_report_has_the_ranks_of_a_lost_host_as_dead(ready: Fan) -> None:
    ready.note_heard(2, False)
    ready.lose(2, "its cable is cut")
    ready.split(Parcel(ReadHost(4)))
    ready.join(0, Parcel(HostReport(4, (info(0), info(1)))))
    (report,) = verbs(ready.join(1, Parcel(HostReport(4, (info(2),)))))
    why = "was on c, which is lost: its cable is cut"
    assert report.ranks[3:] == tuple(RankInfo(r, 0, "c", "dead", ending=why) for r in (3, 4))


def test_respawn_is_answered_once_by_all_hosts(ready: Fan) -> None:
    routed = ready.split(Parcel(Respawn((1, 2))))
    assert downs(routed) == [(0, Respawn((1,))), (1, Respawn((2,)))]
    assert verbs(ready.join(1, Parcel(Respawned((info(2),))))) == []
    assert verbs(ready.join(0, Parcel(Respawned((info(1),))))) == [Respawned((info(2), info(1)))]


def test_respawn_that_failed_on_one_host_says_so_first(ready: Fan) -> None:
    ready.split(Parcel(Respawn((1, 2))))
    ready.join(0, Parcel(Respawned((info(1),))))
    said = verbs(ready.join(1, Parcel(RespawnFailed((2,), "no memory"))))
    assert said == [RespawnFailed((2,), "on b: no memory"), Respawned((info(1),))]


def test_lost_host_loses_its_ranks_and_no_others(ready: Fan) -> None:
    ready.join(2, Parcel(Died(3, "was killed", "")))
    assert verbs(ready.lose(2, "not heard")) == [HostLost("c", (4,), "not heard")]
    assert ready.hosts == {0, 1}
    assert verbs(ready.lose(2, "again")) == []
    assert verbs(ready.join(2, Parcel(LogText(1, "", 0)))) == []
    assert downs(ready.split(Parcel(Relay((0, 4), "work", 6, 0)))) == [
        (0, Relay((0,), "work", 6, 0))
    ]


def test_answers_do_not_wait_for_a_lost_host(ready: Fan) -> None:
    ready.split(Parcel(ReadHost(4)))
    ready.split(Parcel(Respawn((2,))))
    for index in (0, 2):
        ready.join(index, Parcel(HostReport(4, (info(index),))))
    said = verbs(ready.lose(1, "killed"))
    assert [type(verb) for verb in said] == [HostLost, HostReport, RespawnFailed]


def test_ranks_of_a_lost_host_cannot_be_replaced_there(ready: Fan) -> None:
    ready.lose(1, "killed")
    routed = ready.split(Parcel(Respawn((1, 2))))
    assert downs(routed) == [(0, Respawn((1,)))]
    assert verbs(routed) == []
    said = verbs(ready.join(0, Parcel(Respawned((info(1),)))))
    assert said == [RespawnFailed((2,), "b is lost"), Respawned((info(1),))]


def test_host_lost_while_the_mesh_starts_fails_the_start(fan: Fan) -> None:
    (failed,) = verbs(fan.lose(1, "its agent ended"))
    assert failed == StartFailed("host", "b is lost while the mesh starts: its agent ended")


def test_mesh_has_ended_once_every_agent_has(ready: Fan) -> None:
    ready.split(Parcel(Stop()))
    assert verbs(ready.join(0, Parcel(Stopped("stopped")))) == []
    assert verbs(ready.join(2, Parcel(Stopped("stopped")))) == []
    assert verbs(ready.join(1, Parcel(Stopped("stopped")))) == [Stopped("stopped")]


def test_agents_that_have_not_said_that_they_end_may_live_on(ready: Fan) -> None:
    ready.lose(1, "without a connection")
    ready.split(Parcel(Stop()))
    ready.join(0, Parcel(Stopped("stopped")))
    assert ready.unended == AGENTS[1:]
    ready.join(1, Parcel(Stopped("stopped")))  # it is heard again
    ready.lose(2, "without a connection")
    assert ready.unended == AGENTS[2:]


def test_agent_in_place_of_one_that_has_ended_may_live(ready: Fan) -> None:
    ready.join(1, Parcel(Stopped("stopped from outside")))
    assert AGENTS[1] not in ready.unended
    ready.replace(1, AGENTS[1])
    assert AGENTS[1] in ready.unended


def test_agent_that_ends_by_itself_is_a_lost_host(ready: Fan) -> None:
    lost = HostLost("b", (2,), "stopped from outside")
    assert verbs(ready.join(1, Parcel(Stopped("stopped from outside")))) == [lost]


def test_another_host_makes_the_store_when_its_host_is_lost(ready: Fan) -> None:
    ready.join(0, Parcel(StoreUp(99)))
    assert downs(ready.lose(1, "killed")) == []
    assert downs(ready.lose(0, "killed")) == [(2, MakeStore())]
    routed = ready.join(2, Parcel(StoreUp(55)))
    assert verbs(routed) == [StoreDied("was on a host that is lost", 55, "10.0.0.3")]


def test_agent_in_place_of_a_lost_one_gets_the_store_and_forks_on_request(ready: Fan) -> None:
    ready.join(0, Parcel(StoreUp(99)))
    ready.lose(1, "killed")
    new = AgentAddress("d", "tcp://10.0.0.4:7", "key-d", 2, 1)
    assert downs(ready.replace(1, new)) == [(1, UseStore("10.0.0.1", 99, 0))]
    assert ready.lost == ()
    for verb in (welcome(), MeshReady((info(2),))):
        assert verbs(ready.join(1, Parcel(verb))) == []
    assert downs(ready.split(Parcel(Respawn((2,))))) == [(1, Respawn((2,)))]
    assert verbs(ready.join(1, Parcel(Respawned((info(2),))))) == [Respawned((info(2),))]
    assert verbs(ready.lose(1, "killed")) == [HostLost("d", (2,), "killed")]


def test_lost_host_that_is_heard_again_is_taken_back(ready: Fan) -> None:
    ready.join(0, Parcel(StoreUp(99)))
    ready.lose(2, "not heard for 10 s")
    assert verbs(ready.join(2, Parcel(welcome(runs=(RunInfo(6, (3, 4), "x"),))))) == []
    assert ready.returned == frozenset()
    dead = RankInfo(4, 0, "host", "dead", ending="was killed")
    (fault,) = verbs(ready.join(2, Parcel(MeshReady((info(3), dead)))))
    assert "%dist_heal" in fault.text
    assert ready.returned == {2}
    routed = ready.take_back(2)
    assert verbs(routed) == [Returned((info(3),))]
    (to_store, use), (to_stop, stop) = downs(routed)
    assert (to_store, use) == (2, UseStore("10.0.0.1", 99, 0))
    assert (to_stop, stop.ranks, stop.channel) == (2, (3,), "control")
    assert ready.lost == () == tuple(ready.returned)


def test_mesh_that_stops_ends_a_host_that_is_heard_again(ready: Fan) -> None:
    ready.lose(2, "not heard for 10 s")
    assert downs(ready.split(Parcel(ReadHost(4)))) == [(0, ReadHost(4)), (1, ReadHost(4))]
    ready.join(2, Parcel(welcome()))
    assert downs(ready.split(Parcel(Stop()))) == [(index, Stop()) for index in range(3)]


def test_hosts_that_leave_are_not_lost_and_others_get_more(ready: Fan) -> None:
    order = Resize(1, (2, 3), ("dp",), (5,))
    assert downs(ready.split(Parcel(order))) == [(0, order), (1, order)]
    assert (ready.lost, ready.hosts) == ((), frozenset({0, 1}))
    assert downs(ready.split(Parcel(Respawn((3, 4))))) == [(1, Respawn((3, 4)))]
    assert verbs(ready.join(2, Parcel(Stopped("stopped")))) == []


def test_host_that_joins_holds_back_nothing_of_the_others(ready: Fan) -> None:
    ready.join(0, Parcel(StoreUp(99)))
    new = AgentAddress("d", "tcp://10.0.0.4:7", "key-d", 5, 1)
    assert downs(ready.add(new)) == [(3, UseStore("10.0.0.1", 99, 0))]
    order = Resize(1, (2, 1, 2, 1), ("dp",), (6,))
    assert [index for index, _ in downs(ready.split(Parcel(order)))] == [0, 1, 2, 3]
    assert verbs(ready.join(0, Parcel(LogText(1, "", 0)))) == [LogText(1, "", 0)]
    for verb in (welcome(), MeshReady((info(5),))):
        assert verbs(ready.join(3, Parcel(verb))) == []
    assert verbs(ready.join(0, Parcel(LogText(1, "", 0)))) == [LogText(1, "", 0)]
    assert downs(ready.split(Parcel(Respawn((5,))))) == [(3, Respawn((5,)))]


def test_agent_that_ends_before_it_is_taken_back_stays_lost(ready: Fan) -> None:
    ready.lose(2, "not heard for 10 s")
    ready.join(2, Parcel(welcome()))
    ready.join(2, Parcel(MeshReady((info(3), info(4)))))
    ready.join(2, Parcel(Stopped("its lease is over")))
    assert ready.returned == frozenset()
    assert ready.lost == (2,)


def test_host_that_is_lost_before_an_attach_is_not_waited_for() -> None:
    """The first host, which had the store."""
    fan = Fan(AGENTS, [0])
    fan.join(1, Parcel(welcome()))
    (joined,) = verbs(fan.join(2, Parcel(welcome())))
    assert isinstance(joined, Welcome)
    fan.join(1, Parcel(MeshReady((info(2),), 77, store_address="10.0.0.1")))
    routed = fan.join(2, Parcel(MeshReady((info(3), info(4)), 77, store_address="10.0.0.1")))
    (ready,) = verbs(routed)
    assert [rank.phase for rank in ready.ranks] == ["dead", "dead", "idle", "idle", "idle"]
    assert downs(routed) == [(1, MakeStore())]
    fan.replace(0, AGENTS[0])
    assert verbs(fan.join(1, Parcel(LogText(1, "from b", 0)))) == [LogText(1, "from b", 0)]


def test_refusal_of_one_agent_is_heard_while_others_are_awaited() -> None:
    fan = Fan(AGENTS)
    assert verbs(fan.join(1, Parcel(Refused("it is held")))) == [Refused("it is held")]


def test_controller_has_left_once_all_agents_say_so(ready: Fan) -> None:
    assert [index for index, _ in downs(ready.split(Parcel(Detach())))] == [0, 1, 2]
    assert verbs(ready.join(0, Parcel(Detached("it was detached")))) == []
    assert verbs(ready.lose(1, "not heard")) == []
    (last,) = verbs(ready.join(2, Parcel(Detached("it was detached"))))
    assert last == Detached("it was detached")


def test_agent_of_this_machine_alone_is_not_named_in_its_messages() -> None:
    fan = Fan([AgentAddress("", "ipc:///m/agent.sock", "", 0, 2)])
    fan.join(0, Parcel(welcome()))
    (fault,) = verbs(fan.join(0, Parcel(AgentFault("a log cannot be written"))))
    (failed,) = verbs(fan.join(0, Parcel(StartFailed("host", "no torch"))))
    assert (fault.text, failed.text) == ("a log cannot be written", "no torch")
