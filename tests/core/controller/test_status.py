"""What the dashboard makes of two looks at a mesh, what it tells of them, and when it stops."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.status import (
    Attention,
    History,
    Row,
    Snapshot,
    find_changes,
    keep_states,
    read_rows,
)
from cellmesh.wire.messages import RankInfo, RankState


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


def row_of(info: RankInfo, state: RankState | None = None) -> Row:
    [row] = read_rows(None, look([info], {} if state is None else {info.rank: state}))
    return row


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
def test_what_a_rank_does_is_a_word(
    changes: dict[str, Any], answer: RankState | None, doing: str
) -> None:
    assert row_of(info(0, **changes), answer).doing == doing


def test_a_row_tells_where_a_rank_is() -> None:
    answer = state(
        3, execution_count=7, line=5, where="model.step", collective="all_reduce", waited_s=12.345
    )
    row = row_of(info(2, rss_bytes=5), answer)
    assert (row.rank, row.cell, row.line, row.where) == (2, 7, 5, "model.step")
    assert (row.collective, row.waited_s, row.rss, row.pid) == ("all_reduce", 12.3, 5, 102)
    assert (row.gpu, row.gpu_memory, row.note) == (None, None, "")


def test_a_row_of_a_dead_rank_tells_how_it_died_and_nothing_of_its_process() -> None:
    row = row_of(info(1, pid=0, phase="dead", ending="was killed by SIGSEGV", last_output="bye"))
    assert (row.note, row.last_output, row.rss, row.cpu) == (
        "was killed by SIGSEGV",
        "bye",
        None,
        None,
    )


def test_a_new_rank_tells_how_its_predecessor_ended_as_long_as_it_is_empty() -> None:
    assert row_of(info(1, predecessor_ending="exited", last_output="bye"), state()).note == "exited"
    assert row_of(info(1, last_output="bye"), state()).last_output == ""


def test_gpus_are_told_where_ranks_have_one() -> None:
    row = row_of(info(0), state(device="cuda:0", device_bytes=7, device_percent=55))
    assert (row.gpu, row.gpu_memory) == (55, 7)
    unknown = row_of(info(0), state(device="cuda:0", device_bytes=0, device_percent=-1))
    assert (unknown.gpu, unknown.gpu_memory) == (None, 0)


def test_cpu_is_what_was_used_between_two_looks() -> None:
    before = look([info(0, cpu_s=5.0), info(1, cpu_s=5.0), info(2, cpu_s=9.0)], {}, at_s=10.0)
    now = look([info(0, cpu_s=5.5), info(1, cpu_s=8.0), info(2, cpu_s=0.1, pid=999)], {}, at_s=12.0)
    assert [row.cpu for row in read_rows(None, before)] == [None] * 3
    assert [row.cpu for row in read_rows(before, now)] == [25.0, 150.0, None]
    assert [row.cpu for row in read_rows(now, now)] == [None] * 3


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
def test_what_may_have_changed_is_asked(changes: dict[str, Any], said: RankState | None) -> None:
    before = look([info(0)], {} if said is None else {0: said})
    assert keep_states(before, [info(0, **changes)], 11.0) == {}
    assert keep_states(look([info(0)], {0: state()}), [info(0)], 11.0) == {0: state()}


# ---- what is told of them


def test_only_what_has_changed_is_told() -> None:
    before = [Row(rank=0, doing="idle", rss=1), Row(rank=1, doing="idle", rss=1)]
    assert [change["rank"] for change in find_changes((), before)] == [0, 1]
    assert find_changes((), before)[0].keys() == {*Row.__struct_fields__}
    assert find_changes(before, before) == []
    now = [before[0], Row(rank=1, doing="runs", rss=1, line=4)]
    assert find_changes(before, now) == [{"rank": 1, "doing": "runs", "line": 4}]


def test_what_is_told_adds_up_to_the_rows() -> None:
    looks = [
        [Row(rank=0, doing="idle")],
        [Row(rank=0, doing="waits", collective="barrier", waited_s=1.0)],
        [Row(rank=0, doing="dead", note="exited with code 1")],
    ]
    known: dict[int, dict[str, Any]] = {0: {}}
    before: list[Row] = []
    for rows in looks:
        for change in find_changes(before, rows):
            known[change["rank"]].update(change)
        before = rows
        assert Row(**known[0]) == rows[0]


def test_series_hold_the_last_minute() -> None:
    history = History()
    for second in range(100):
        told = history.add(float(second), [Row(rank=0, doing="idle", rss=second, cpu=1.5)])
    assert told == {"at_s": 99.0, "rss": [99], "cpu": [1.5]}
    samples = history.all()
    assert [sample["at_s"] for sample in samples] == [float(second) for second in range(40, 100)]
    assert samples[-1] == told


def test_series_begin_anew_with_another_hosts_clock() -> None:
    history = History()
    history.add(1000.0, [Row(rank=0, doing="idle", rss=1)])
    history.add(3.0, [Row(rank=0, doing="idle", rss=2)])
    assert history.all() == [{"at_s": 3.0, "rss": [2]}]


# ---- who looks


def test_it_is_looked_at_as_long_as_a_view_says_so() -> None:
    attention = Attention(5.0)
    assert not attention
    assert attention.hear("a", True)
    assert not attention.hear("a", True)
    for _ in range(3):
        attention.wait(4.0)
        assert attention
        attention.hear("a", True)
    attention.wait(4.0)
    attention.wait(1.0)
    assert not attention
    assert attention.hear("a", True), "it is told all again"


def test_each_view_counts() -> None:
    attention = Attention(5.0)
    attention.hear("a", True)
    attention.hear("b", True)
    attention.hear("a", False)
    assert attention
    attention.hear("b", False)
    attention.hear("b", False)
    assert not attention


def test_a_page_with_ever_new_views_is_not_listened_to() -> None:
    attention = Attention(max_views=2)
    assert [attention.hear(view, True) for view in ("a", "b", "c", "a")] == [
        True,
        True,
        False,
        False,
    ]
    attention.hear("a", False)
    assert attention.hear("c", True)
