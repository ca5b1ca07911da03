"""Many agents look like one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cellmesh.controller.core.mesh_state import HostLost, Returned
from cellmesh.controller.session.hosts.fan import Fan, Routed
from cellmesh.wire.attach import Detach, Detached, Refused, RunInfo, Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import Host
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
    Host(name, f"tcp://10.0.0.{number}:1000", f"key-{name}", first, size)
    for number, (name, first, size) in enumerate([("a", 0, 2), ("b", 2, 1), ("c", 3, 2)], 1)
]


def info(rank: int) -> RankInfo:
    return RankInfo(rank, 100 + rank, "host", "idle")


def infos(*ranks: int) -> tuple[RankInfo, ...]:
    return tuple(map(info, ranks))


def join(fan: Fan, index: int, *sent: Any) -> list[Any]:
    """The messages that reach the core when an agent sends these."""
    return [verb for one in sent for verb in verbs(fan.join(index, Parcel(one)))]


def split(fan: Fan, verb: Any) -> list[tuple[int, Any]]:
    return downs(fan.split(Parcel(verb)))


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
        join(fan, index, welcome())
    return fan


@pytest.fixture
def ready(fan: Fan) -> Fan:
    for index, agent in enumerate(AGENTS):
        join(fan, index, MeshReady(infos(*agent.ranks), 77 if index == 0 else 0))
    return fan


def test_each_agent_gets_what_concerns_its_ranks(fan: Fan) -> None:
    order = Parcel(Relay((1, 3, 4), "work", 5, 1), (b"cell",))
    routed = fan.split(order)
    assert downs(routed) == [(0, Relay((1,), "work", 5, 1)), (2, Relay((3, 4), "work", 5, 1))]
    assert all(parcel.buffers == (b"cell",) for _, parcel in routed.down)
    assert split(fan, Kill((2,))) == [(1, Kill((2,)))]
    assert split(fan, ReadLog(9, 4, 100)) == [(2, ReadLog(9, 4, 100))]
    assert split(fan, Stop()) == [(index, Stop()) for index in range(3)]


def test_welcomes_are_joined_before_anything_else_is_heard() -> None:
    fan = Fan(AGENTS)
    assert join(fan, 1, Refused("it is held")) == [Refused("it is held")]
    early = Parcel(Died(0, "was killed", ""))
    assert join(fan, 0, welcome(next_run=4, runs=(RunInfo(3, (0,), "x"),))) == []
    assert verbs(fan.join(0, early)) == []
    join(fan, 1, welcome(next_run=7, away_s=2.0))
    last = welcome(next_run=1, runs=(RunInfo(3, (3, 4), "x"), RunInfo(5, (4,), "y")))
    joined, died = join(fan, 2, last)
    assert (joined.next_run, joined.away_s) == (7, 2.0)
    assert joined.runs == (RunInfo(3, (0, 3, 4), "x"), RunInfo(5, (4,), "y"))
    assert died == early.verb


def test_progress_counts_the_ranks_of_all_hosts(fan: Fan) -> None:
    join(fan, 0, Progress("process group", 2))
    join(fan, 1, Progress("forking ranks", 0))
    (progress,) = join(fan, 2, Progress("process group", 1))
    assert progress == Progress("process group", 3)


def test_mesh_is_ready_once_every_host_is_also_after_a_restart(fan: Fan) -> None:
    for _ in range(2):
        assert join(fan, 2, MeshReady(infos(3, 4))) == []
        assert join(fan, 0, MeshReady(infos(0, 1), 77)) == []
        assert join(fan, 1, MeshReady(infos(2))) == [MeshReady(infos(*range(5)), 77)]
        assert len(split(fan, Restart())) == 3


def test_other_hosts_hear_where_the_store_is(fan: Fan) -> None:
    use = UseStore("10.0.0.1", 99)
    assert downs(fan.join(0, Parcel(StoreUp(99)))) == [(1, use), (2, use)]
    died = StoreDied("was killed", 98)
    routed = fan.join(0, Parcel(died))
    assert verbs(routed) == [died]
    assert downs(routed) == [(1, UseStore("10.0.0.1", 98)), (2, UseStore("10.0.0.1", 98))]
    assert downs(fan.join(0, Parcel(StoreDied("was killed", 0)))) == []


def test_first_failed_start_is_reported_with_its_host_and_ends_the_others(fan: Fan) -> None:
    failed = StartFailed("user", "no module x")
    assert join(fan, 1, failed) == [StartFailed("user", "on b: no module x")]
    assert join(fan, 2, failed) == []
    (lost,) = verbs(Fan(AGENTS).lose(1, "its agent ended"))
    assert lost == StartFailed("host", "b is lost while the mesh starts: its agent ended")
    routed = fan.join(1, Parcel(Stopped("the start failed")))
    assert verbs(routed) == [Stopped("the start failed")]
    assert downs(routed) == [(0, Stop()), (2, Stop())]


def test_question_is_answered_without_a_host_that_is_not_heard(ready: Fan) -> None:
    split(ready, ReadHost(4))
    join(ready, 0, HostReport(4, infos(0, 1), 1.0))
    join(ready, 2, HostReport(4, infos(3, 4), 2.0))
    (report,) = verbs(ready.note_heard(1, False))
    silent = msgspec.structs.replace(info(2), is_heard=False)
    assert report == HostReport(4, (*infos(0, 1), silent, *infos(3, 4)), 2.0)
    ready.note_heard(1, True)
    split(ready, ReadHost(5))
    for index, num_said in ((2, 0), (0, 0), (1, 1)):
        said = join(ready, index, HostReport(5, infos(*AGENTS[index].ranks), 1.0 + index))
        assert said == [HostReport(5, infos(*range(5)), 3.0)] * num_said


def test_store_is_made_by_a_host_that_stays(ready: Fan) -> None:
    join(ready, 0, StoreUp(77))
    ready.note_heard(1, False)
    assert downs(ready.lose(0, "cut")) == [(2, MakeStore())]  # the other one is not heard
    ready.note_heard(1, True)
    assert downs(ready.lose(2, "cut, too")) == [(1, MakeStore())]
    assert downs(ready.replace(0, AGENTS[0])) == []  # until there is a store
    made = ready.join(1, Parcel(StoreUp(88)))
    assert downs(made) == [(0, UseStore("10.0.0.2", 88))]
    assert verbs(made) == [StoreDied("was on a host that is lost", 88, "10.0.0.2")]


def test_resize_that_leaves_the_store_out_has_it_made_again(ready: Fan) -> None:
    join(ready, 1, StoreUp(88))
    resize = Resize(1, (2,), ("dp",), (2,))
    assert split(ready, resize) == [(0, resize), (0, MakeStore())]
    assert downs(ready.join(0, Parcel(StoreUp(99)))) == []
    assert split(ready, resize) == [(0, resize)]


def test_respawn_is_answered_once_by_all_hosts_and_says_first_that_one_failed(ready: Fan) -> None:
    respawn = Respawn((1, 2))
    assert split(ready, respawn) == [(0, Respawn((1,))), (1, Respawn((2,)))]
    assert join(ready, 1, Respawned(infos(2))) == []
    assert join(ready, 0, Respawned(infos(1))) == [Respawned(infos(2, 1))]
    split(ready, respawn)
    assert join(ready, 0, Respawned(infos(1))) == []
    failed = join(ready, 1, RespawnFailed((2,), "no memory"))
    assert failed == [RespawnFailed((2,), "on b: no memory"), Respawned(infos(1))]


def test_lost_host_loses_its_ranks_and_no_others(ready: Fan) -> None:
    join(ready, 2, Died(3, "was killed", ""))
    assert verbs(ready.lose(2, "not heard")) == [HostLost("c", (4,), "not heard")]
    assert ready.hosts == {0, 1}
    assert verbs(ready.lose(2, "again")) == []
    assert join(ready, 2, LogText(1, "", 0)) == []
    assert split(ready, Relay((0, 4), "work", 6, 0)) == [(0, Relay((0,), "work", 6, 0))]
    assert join(ready, 1, Stopped("killed")) == [HostLost("b", (2,), "killed")]


def test_answers_do_not_wait_for_a_lost_host(ready: Fan) -> None:
    split(ready, ReadHost(4))
    split(ready, Respawn((2,)))
    for index in (0, 2):
        join(ready, index, HostReport(4, infos(index)))
    said = verbs(ready.lose(1, "killed"))
    assert [type(verb) for verb in said] == [HostLost, HostReport, RespawnFailed]


def test_agents_that_have_not_said_that_they_end_may_live_on(ready: Fan) -> None:
    ready.lose(1, "without a connection")
    split(ready, Stop())
    join(ready, 0, Stopped("stopped"))
    assert ready.unended == AGENTS[1:]
    join(ready, 1, Stopped("stopped"))  # it is heard again
    assert ready.unended == AGENTS[2:]


def test_lost_host_that_is_heard_again_is_taken_back(ready: Fan) -> None:
    join(ready, 0, StoreUp(99))
    ready.lose(2, "not heard for 10 s")
    assert join(ready, 2, welcome(runs=(RunInfo(6, (3, 4), "x"),))) == []
    assert ready.returned == frozenset()
    dead = RankInfo(4, 0, "host", "dead", ending="was killed")
    (fault,) = join(ready, 2, MeshReady((info(3), dead)))
    assert "%dist_heal" in fault.text
    assert ready.returned == {2}
    routed = ready.take_back(2)
    assert verbs(routed) == [Returned(infos(3))]
    (to_store, use), (to_stop, stop) = downs(routed)
    assert (to_store, use) == (2, UseStore("10.0.0.1", 99, 0))
    assert (to_stop, stop.ranks, stop.channel) == (2, (3,), "control")
    assert ready.lost == () == tuple(ready.returned)
    ready.lose(2, "not heard for 10 s")
    join(ready, 2, welcome(), MeshReady(infos(3, 4)), Stopped("its lease is over"))
    assert (ready.returned, ready.lost) == (frozenset(), (2,))


def test_hosts_that_leave_are_not_lost_and_others_get_more(ready: Fan) -> None:
    order = Resize(1, (2, 3), ("dp",), (5,))
    assert split(ready, order) == [(0, order), (1, order)]
    assert (ready.lost, ready.hosts) == ((), frozenset({0, 1}))
    assert split(ready, Respawn((3, 4))) == [(1, Respawn((3, 4)))]
    assert join(ready, 2, Stopped("stopped")) == []


def test_host_that_joins_holds_back_nothing_of_the_others(ready: Fan) -> None:
    join(ready, 0, StoreUp(99))
    new = Host("d", "tcp://10.0.0.4:7", "key-d", 5, 1)
    assert downs(ready.add(new)) == [(3, UseStore("10.0.0.1", 99, 0))]
    order = Resize(1, (2, 1, 2, 1), ("dp",), (6,))
    assert [index for index, _ in split(ready, order)] == [0, 1, 2, 3]
    assert join(ready, 0, LogText(1, "", 0)) == [LogText(1, "", 0)]
    assert join(ready, 3, welcome(), MeshReady(infos(5))) == []
    assert join(ready, 0, LogText(1, "", 0)) == [LogText(1, "", 0)]
    assert split(ready, Respawn((5,))) == [(3, Respawn((5,)))]


@pytest.mark.parametrize("last", [Stopped("killed"), Refused("killed"), None])
def test_host_that_ends_before_it_has_ranks_loses_none_and_leaves(ready: Fan, last: Any) -> None:
    ready.add(Host("d", "tcp://10.0.0.4:7", "key-d", 5, 1))
    assert split(ready, ReadHost(4)) == [(index, ReadHost(4)) for index in range(3)]
    assert "d (no ranks yet)" in ready.describe(3)
    said = verbs(ready.lose(3, "killed")) if last is None else join(ready, 3, last)
    assert said == []
    assert (ready.lost, ready.why_lost(3)) == ((3,), "killed")
    ready.keep(3)
    assert ready.lost == ()
    assert ready.unended == AGENTS


def test_host_that_is_lost_before_an_attach_is_not_waited_for() -> None:
    """The first host, which had the store."""
    fan = Fan(AGENTS, [0])
    join(fan, 1, welcome())
    (joined,) = join(fan, 2, welcome())
    assert isinstance(joined, Welcome)
    join(fan, 1, MeshReady(infos(2), 77, store_address="10.0.0.1"))
    routed = fan.join(2, Parcel(MeshReady(infos(3, 4), 77, store_address="10.0.0.1")))
    (ready,) = verbs(routed)
    assert [rank.phase for rank in ready.ranks] == ["dead", "dead", "idle", "idle", "idle"]
    assert downs(routed) == [(1, MakeStore())]
    fan.replace(0, AGENTS[0])
    assert join(fan, 1, LogText(1, "from b", 0)) == [LogText(1, "from b", 0)]


def test_controller_has_left_once_all_agents_say_so(ready: Fan) -> None:
    assert [index for index, _ in split(ready, Detach())] == [0, 1, 2]
    assert join(ready, 0, Detached("it was detached")) == []
    assert verbs(ready.lose(1, "not heard")) == []
    (last,) = join(ready, 2, Detached("it was detached"))
    assert last == Detached("it was detached")


def test_faults_name_their_host_if_there_are_several(fan: Fan) -> None:
    assert join(fan, 0, AgentFault("oops")) == [AgentFault("on a: oops")]
    single = Fan([Host("", "ipc:///s", "", 0, 2)])
    join(single, 0, welcome())
    assert join(single, 0, AgentFault("oops")) == [AgentFault("oops")]
    assert join(single, 0, StartFailed("host", "no torch")) == [StartFailed("host", "no torch")]
