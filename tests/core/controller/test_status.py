"""The activity of ranks, and what keeps them from going on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.controller import status
from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.status import Snapshot, activity_of, show_stacks
from cellmesh.wire.groups import Begun, GroupCount, InFlight
from cellmesh.wire.status import RankInfo, RankState, StackText


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


def test_equal_stacks_are_shown_once_and_ranks_without_one_are_named() -> None:
    answers = {0: StackText(1, "at a\n"), 1: StackText(1, "at a\n")}
    session: Any = SimpleNamespace(dead_ranks={3, 9}, ask=lambda question: answers)
    assert show_stacks(session, (0, 1, 2, 3)).split("\n\n") == [
        "ranks 0-1:\nat a",
        "rank 2:\n  did not answer: it is stopped, or too busy to",
        "rank 3:\n  dead",
    ]
