"""The tables of transitions, and the log of the last ones."""

from __future__ import annotations

import collections
from typing import Any, get_args

import pytest

from cellmesh.controller.core import transitions
from cellmesh.controller.core.recovery import Recovery
from cellmesh.controller.core.runs import Runs
from cellmesh.controller.core.transitions import (
    NUM_KEPT,
    RECOVERY,
    RUN,
    Transition,
    add_transition,
    describe_transitions,
)

from ....support.core_script import Script


@pytest.mark.parametrize(
    ("table", "name", "actor"), [(RECOVERY, "Recovery", Recovery), (RUN, "Run", Runs)]
)
def test_a_table_names_each_phase_event_and_action(table: Any, name: str, actor: type) -> None:
    def all_of(kind: str) -> set[str]:
        return set(get_args(getattr(transitions, f"{name}{kind}")))

    assert {state for state, _ in table} == all_of("Phase")
    assert {event for _, event in table} == all_of("Event")
    assert all(callable(getattr(actor, f"_{action}", None)) for _, action in table.values())
    assert {then for then, _ in table.values() if then is not None} <= all_of("Phase")


def test_a_log_keeps_the_last_hundred_and_of_repeated_ones_the_last() -> None:
    log = collections.deque[Transition](maxlen=NUM_KEPT)
    for number in range(2 * NUM_KEPT):
        new = Transition(number, f"run {number // 2}", "running", "stuck", "releasing")
        add_transition(log, new)
    assert [each.at for each in log] == list(range(1, 2 * NUM_KEPT, 2))
    add_transition(log, Transition(500.0, "recovery", "calm", "trouble", "examining"))
    assert (len(log), log[0].at) == (NUM_KEPT, 3)
    assert describe_transitions([*log][-2:], 510.0) == [
        "311.00 s ago  run 99: running -> releasing (stuck)",
        " 10.00 s ago  recovery: calm -> examining (trouble)",
    ]


def test_transitions_of_a_run_that_fails_and_of_its_recovery_are_logged() -> None:
    script = Script.play("2 ranks\nrun 1 on 0-1; @1 0 fail 1; @2.5 tick; 1 fail 1; drive")
    logged: dict[str, list[str]] = {}
    for each in script.core.mesh.transitions:
        logged.setdefault(each.subject, []).append(f"{each.state}: {each.event}")
    assert logged == {
        "run 1": ["running: a rank failed", "failing: time is over", "releasing: ended"],
        "recovery": ["calm: reset", "calm: trouble", "examining: all well"],
    }
