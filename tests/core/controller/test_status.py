"""The activity of ranks, and their stacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.status import activity_of, show_stacks
from cellmesh.wire.status import RankInfo, RankState, StackText


def info(rank: int, **changes: Any) -> RankInfo:
    return msgspec.structs.replace(RankInfo(rank, 100 + rank, "node", "idle"), **changes)


def state(run: int = -1, **changes: Any) -> RankState:
    return msgspec.structs.replace(RankState(1, run, 0, 0, "", "", "cpu", 0), **changes)


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
