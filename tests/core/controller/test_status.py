"""The activity of ranks, and which of them are asked again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cellmesh.controller import status
from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.status import Snapshot, activity_of, keep_states
from cellmesh.wire.groups import Begun, GroupCount, InFlight
from cellmesh.wire.status import RankInfo, RankState


def info(rank: int, **changes: Any) -> RankInfo:
    return msgspec.structs.replace(RankInfo(rank, 100 + rank, "node", "idle"), **changes)


def state(run: int = -1, **changes: Any) -> RankState:
    return msgspec.structs.replace(RankState(1, run, 0, 0, "", "", "cpu", 0), **changes)


def look(infos: list[RankInfo], states: dict[int, RankState], at_s: float = 10.0) -> Snapshot:
    return Snapshot(at_s, "ready", {"dp": len(infos)}, infos, states)


# ---- trouble


def test_ranks_whose_operations_cannot_meet_are_said() -> None:
    states = {}
    for rank, name in enumerate(("barrier", "all_reduce")):
        counts = (GroupCount("0", (), 1, recent=(Begun(1, name),)),)
        flight = (InFlight("0", name, 1),)
        states[rank] = state(3, collective=name, waited_s=9.0, counts=counts, in_flight=flight)
    infos = [info(rank, phase="running") for rank in range(2)]
    assert status.find_trouble(look(infos, states)) == (
        "these cannot meet: on the default group the 1st operation is barrier on rank 0 and "
        "all_reduce on rank 1"
    )
    assert status.find_trouble(look(infos, {0: states[0]})) == ""


# ---- activity


@pytest.mark.parametrize(
    ("changes", "answer", "activity"),
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
    changes: dict[str, Any], answer: RankState | None, activity: str
) -> None:
    assert activity_of(info(0, **changes), answer) == activity


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
