"""The tables of transitions, and the log of those that came last."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from cellmesh.controller.core import transitions
from cellmesh.controller.core.recovery import Recovery
from cellmesh.controller.core.runs import Runs
from cellmesh.controller.core.transitions import (
    NUM_KEPT,
    RECOVERY,
    RUN,
    TransitionLog,
    describe_transitions,
)
from cellmesh.wire.messages import Died, Done

from ....support.core_decisions import (
    FAILED,
    heal_all,
    hear,
    lose_rank,
    ready_core,
    running_core,
    stop,
)
from ....support.recovery_cases import submit


def steps(core: Any, subject: str) -> list[tuple[str, str, str]]:
    return [each[2:] for each in core.mesh.transitions if each.subject == subject]


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
    log = TransitionLog()
    for number in range(2 * NUM_KEPT):
        log.add(number, f"run {number // 2}", "running", "stuck", "releasing")
    assert [each.at for each in log.all()] == list(range(1, 2 * NUM_KEPT, 2))
    log.add(500.0, "recovery", "calm", "trouble", "examining")
    assert len(log.all()) == NUM_KEPT
    assert log.all()[0].at == 3
    assert describe_transitions(log.all()[-2:], 510.0) == [
        "311.00 s ago  run 99: running -> releasing (stuck)",
        " 10.00 s ago  recovery: calm -> examining (trouble)",
    ]


def test_a_run_that_ends_as_it_should_leaves_no_transition() -> None:
    core = ready_core(2)
    before = tuple(core.mesh.transitions)
    submit(core, 1, (0, 1))
    hear(core, (0, 1), Done(1))
    assert tuple(core.mesh.transitions) == before


def test_a_run_that_fails_is_followed_to_its_end_and_to_the_recovery() -> None:
    core = running_core(2, (0, 1))
    hear(core, (0,), FAILED, 1.0)
    core.tick(2.5)
    heal_all(core, hear(core, (1,), FAILED, 2.6), 2.6)
    assert steps(core, "run 1") == [
        ("running", "a rank failed", "failing"),
        ("failing", "time is over", "releasing"),
        ("releasing", "ended", "ended"),
    ]
    assert steps(core, "recovery")[-2:] == [
        ("calm", "trouble", "examining"),
        ("examining", "all well", "calm"),
    ]


def test_a_run_that_is_interrupted_twice_is_killed() -> None:
    core = running_core(2, (0, 1))
    stop(core, 1, (0, 1), 1.0)
    core.interrupt([1], 2.0)
    core.tick(4.0)
    lose_rank(core, Died(0, "was killed by SIGKILL", ""), 4.1)
    assert steps(core, "run 1")[:5] == [
        ("running", "interrupted", "aligning"),
        ("aligning", "all ranks stand", "interrupted"),
        ("interrupted", "interrupted again", "killing"),
        ("killing", "still there", "interrupted"),
        ("interrupted", "a rank failed", "interrupted"),
    ]
