"""The status of ranks out of two snapshots, its history, and which views are seen."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from cellmesh.controller import status
from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.status import (
    RankStatus,
    Snapshot,
    StatusHistory,
    ViewHeartbeat,
    keep_states,
    rank_statuses,
)
from cellmesh.wire.groups import Begun, GroupCount, InFlight
from cellmesh.wire.status import RankInfo, RankState


def info(rank: int, **changes: Any) -> RankInfo:
    fields = {
        "pid": 100 + rank,
        "host": "node",
        "phase": "idle",
        "device": "cpu",
        "backend": "gloo",
    }
    return RankInfo(rank=rank, **{**fields, **changes})


def state(run: int = -1, **changes: Any) -> RankState:
    fields: dict[str, Any] = {"execution_count": 0, "line": 0, "where": "", "collective": ""}
    return RankState(1, run, **{**fields, "device": "cpu", "device_bytes": 0, **changes})


def look(infos: list[RankInfo], states: dict[int, RankState], at_s: float = 10.0) -> Snapshot:
    return Snapshot(at_s, "ready", {"dp": len(infos)}, infos, states)


def row_of(info: RankInfo, state: RankState | None = None) -> RankStatus:
    [row] = rank_statuses(None, look([info], {} if state is None else {info.rank: state}))
    return row


# ---- trouble


def test_ranks_whose_operations_cannot_meet_are_said() -> None:
    states = {
        rank: state(
            3,
            collective=name,
            waited_s=9.0,
            counts=(GroupCount("0", (), 1, recent=(Begun(1, name),)),),
            in_flight=(InFlight("0", name, 1),),
        )
        for rank, name in enumerate(("barrier", "all_reduce"))
    }
    infos = [info(rank, phase="running") for rank in range(2)]
    assert status.find_trouble(look(infos, states)) == (
        "these cannot meet: on the default group the 1st operation is barrier on rank 0 and "
        "all_reduce on rank 1"
    )
    assert status.find_trouble(look(infos, {0: states[0]})) == ""


# ---- rows


@pytest.mark.parametrize(
    ("changes", "answer", "doing"),
    [
        ({}, state(), "idle"),
        ({"predecessor_ending": "was killed by SIGKILL"}, state(), "new"),
        ({"predecessor_ending": "was killed by SIGKILL"}, state(3), "runs"),
        ({"phase": "running"}, state(3), "runs"),
        ({"phase": "running"}, state(3, collective="all_reduce"), "waits"),
        ({"phase": "running"}, state(3, collective="all_reduce", asks=True), "asks"),
        ({"phase": "running"}, state(FIRST_HEAL + 1, collective="barrier"), "heals"),
        ({"phase": "running"}, None, "silent"),
        ({"phase": "starting"}, None, "starts"),
        ({"phase": "dead", "pid": 0, "ending": "exited with code 3"}, None, "dead"),
        ({"phase": "dead", "pid": 0, "ending": "exited with code 3"}, state(), "dead"),
    ],
)
def test_activity_of_a_rank_is_one_word(
    changes: dict[str, Any], answer: RankState | None, doing: str
) -> None:
    assert row_of(info(0, **changes), answer).doing == doing


def test_row_shows_where_a_rank_is() -> None:
    answer = state(
        3, execution_count=7, line=5, where="model.step", collective="all_reduce", waited_s=12.345
    )
    row = row_of(info(2, rss_bytes=5), answer)
    assert (row.rank, row.cell, row.line, row.where) == (2, 7, 5, "model.step")
    assert (row.collective, row.waited_s, row.rss, row.pid) == ("all_reduce", 12.3, 5, 102)
    assert (row.gpu, row.gpu_memory, row.note) == (None, None, "")


def test_row_of_a_dead_rank_shows_its_ending_and_no_process() -> None:
    row = row_of(info(1, pid=0, phase="dead", ending="was killed by SIGSEGV", last_output="bye"))
    assert (row.note, row.last_output, row.rss, row.cpu) == (
        "was killed by SIGSEGV",
        "bye",
        None,
        None,
    )


def test_new_rank_shows_the_ending_of_its_predecessor_while_empty() -> None:
    assert row_of(info(1, predecessor_ending="exited", last_output="bye"), state()).note == "exited"
    assert row_of(info(1, last_output="bye"), state()).last_output == ""


def test_gpus_are_shown_for_ranks_that_have_one() -> None:
    row = row_of(info(0), state(device="cuda:0", device_bytes=7, device_percent=55))
    assert (row.gpu, row.gpu_memory) == (55, 7)
    unknown = row_of(info(0), state(device="cuda:0", device_bytes=0, device_percent=-1))
    assert (unknown.gpu, unknown.gpu_memory) == (None, 0)


def test_cpu_is_what_was_used_between_two_looks() -> None:
    before = look([info(0, cpu_s=5.0), info(1, cpu_s=5.0), info(2, cpu_s=9.0)], {}, at_s=10.0)
    now = look([info(0, cpu_s=5.5), info(1, cpu_s=8.0), info(2, cpu_s=0.1, pid=999)], {}, at_s=12.0)
    assert [row.cpu for row in rank_statuses(None, before)] == [None] * 3
    assert [row.cpu for row in rank_statuses(before, now)] == [25.0, 150.0, None]
    assert [row.cpu for row in rank_statuses(now, now)] == [None] * 3


def test_idle_ranks_are_asked_now_and_then_and_others_always() -> None:
    infos = [info(rank) for rank in range(10)]
    before = look(infos, {rank: state() for rank in range(10)}, at_s=10.0)
    assert keep_states(None, infos, 11.0) == {}
    assert sorted(keep_states(before, infos, 11.0)) == [0, 2, 3, 4, 5, 7, 8, 9]
    asked = [
        set(range(10)) - keep_states(before, infos, at_s).keys()
        for at_s in (11.2, 12.2, 13.2, 14.2, 15.2)
    ]
    assert sorted(rank for ranks in asked for rank in ranks) == list(range(10))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phase": "running"}, state()),
        ({"phase": "dead", "pid": 0}, state()),
        ({"pid": 999}, state()),
        ({}, state(3)),
        ({}, state(is_broken=True)),
        ({}, state(device="cuda:0")),
        ({}, None),
    ],
)
def test_refresh_asks_ranks_that_may_have_changed(
    changes: dict[str, Any], said: RankState | None
) -> None:
    before = look([info(0)], {} if said is None else {0: said})
    assert keep_states(before, [info(0, **changes)], 11.0) == {}
    assert keep_states(look([info(0)], {0: state()}), [info(0)], 11.0) == {0: state()}


# ---- what is told of them


def test_rank_status_is_sent_without_its_defaults() -> None:
    rank = RankStatus(rank=1, doing="runs", rss=1, line=4)
    assert msgspec.to_builtins(rank) == {"rank": 1, "doing": "runs", "rss": 1, "line": 4}


def test_series_hold_the_last_minute() -> None:
    history = StatusHistory()
    for second in range(100):
        told = history.add(float(second), [RankStatus(rank=0, doing="idle", rss=second, cpu=1.5)])
    assert told == {"at_s": 99.0, "rss": [99], "cpu": [1.5]}
    samples = history.all()
    assert [sample["at_s"] for sample in samples] == [float(second) for second in range(40, 100)]
    assert samples[-1] == told


def test_series_restart_with_the_clock_of_another_host() -> None:
    history = StatusHistory()
    history.add(1000.0, [RankStatus(rank=0, doing="idle", rss=1)])
    history.add(3.0, [RankStatus(rank=0, doing="idle", rss=2)])
    assert history.all() == [{"at_s": 3.0, "rss": [2]}]


# ---- which views are seen


def test_view_is_seen_as_long_as_it_says_so() -> None:
    heartbeat = ViewHeartbeat()
    assert not heartbeat
    assert heartbeat.hear("a", True)
    assert not heartbeat.hear("a", True)
    for _ in range(3):
        heartbeat.pass_time(4.0)
        assert heartbeat
        heartbeat.hear("a", True)
    heartbeat.pass_time(4.0)
    heartbeat.pass_time(1.0)
    assert not heartbeat
    assert heartbeat.hear("a", True), "it is sent all again"


def test_view_that_is_closed_leaves_the_others() -> None:
    heartbeat = ViewHeartbeat()
    heartbeat.hear("a", True)
    heartbeat.hear("b", True)
    heartbeat.hear("a", False)
    assert heartbeat
    heartbeat.hear("b", False)
    heartbeat.hear("b", False)
    assert not heartbeat


def test_views_beyond_the_bound_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_VIEWS", 2)
    heartbeat = ViewHeartbeat()
    heard = [heartbeat.hear(view, True) for view in ("a", "b", "c", "a")]
    assert heard == [True, True, False, False]
    heartbeat.hear("a", False)
    assert heartbeat.hear("c", True)


def test_silence_counts_only_where_messages_could_be_heard() -> None:
    """Front ends without subshells hold messages back while a cell runs."""
    heartbeat = ViewHeartbeat()

    async def run_a_cell() -> None:
        heartbeat.hear("a", True)  # on this loop, which is busy from here
        for _ in range(3):
            heartbeat.pass_time(4.0)
        assert heartbeat
        await asyncio.sleep(0)  # the loop counts what it was asked to: the first time
        heartbeat.pass_time(0.5)
        assert heartbeat

    asyncio.run(run_a_cell())
    heartbeat.pass_time(1.0)  # the loop is closed: silence counts
    assert not heartbeat


def test_view_that_could_not_be_heard_for_long_is_gone() -> None:
    heartbeat = ViewHeartbeat()

    async def run_a_long_cell() -> None:
        heartbeat.hear("a", True)
        heartbeat.pass_time(1.0)
        heartbeat.pass_time(status.UNHEARD_S + 1.0)
        assert not heartbeat
        heartbeat.hear("a", True)
        assert heartbeat

    asyncio.run(run_a_long_cell())
