"""Another number of ranks, as the core decides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellmesh.controller.core.core import Core
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Heal
from cellmesh.wire.messages import Resize, Respawn, RespawnFailed

from ....support.core_decisions import answer_probe, heal_all, only, ready_core
from ....support.recovery_cases import (
    asked_of_agent,
    assert_calm,
    die,
    healed_by_user,
    reports,
    respawned,
    submit,
)


def resized(core: Core, *layout: int) -> list[Any]:
    assert core.why_not_resize(sum(layout)) == ""
    _, effects = core.resize(layout, {"dp": sum(layout)}, 0.0)
    return effects


def test_new_ranks_are_forked_then_all_make_the_groups_of_the_new_size() -> None:
    core = ready_core(2, new_generation=lambda: 7)
    effects = resized(core, 4)
    assert asked_of_agent(effects, Resize) == [Resize(1, (4,), ("dp",), (4,))]
    effects = answer_probe(core, effects, 0.0)
    assert asked_of_agent(effects, Respawn) == [Respawn((2, 3))]
    effects = answer_probe(core, respawned(core, 2, 3), 0.0)
    ranks, heal = only(Heal, effects)
    assert ranks == (0, 1, 2, 3)
    assert (heal.blueprint, heal.num_resizes, heal.layout) == (b"", 1, (4,))
    (report,) = reports(heal_all(core, effects, 0.0))
    assert (report.respawned, report.healed, report.failure) == ((2, 3), True, "")
    assert_calm(core)


def test_ranks_that_stay_make_the_groups_of_a_smaller_size() -> None:
    core = ready_core(4)
    effects = answer_probe(core, resized(core, 2, 1), 0.0)
    ranks, heal = only(Heal, effects)
    assert (ranks, heal.layout, heal.mesh_shape) == ((0, 1, 2), (2, 1), (3,))
    heal_all(core, effects, 0.0)
    assert [info.rank for info in core.mesh.ranks] == [0, 1, 2]
    assert_calm(core)


def test_new_ranks_that_cannot_start_leave_a_mesh_that_a_heal_completes() -> None:
    core = ready_core(2)
    answer_probe(core, resized(core, 3), 0.0)
    effects = core.receive(Parcel(RespawnFailed((2,), "no memory")), 0.0)
    effects = heal_all(core, answer_probe(core, effects, 0.0), 0.0)
    (report,) = reports(effects)
    assert report.dead == (2,)
    assert "no memory" in report.failure
    effects = answer_probe(core, healed_by_user(core), 0.0)
    assert asked_of_agent(effects, Respawn) == [Respawn((2,))]


def test_dead_ranks_may_leave() -> None:
    core = ready_core(3)
    heal_all(core, answer_probe(core, die(core, 2), 0.0), 0.0)
    assert "rank 2 must live" in core.why_not_resize(4)
    heal_all(core, answer_probe(core, resized(core, 2), 0.0), 0.0)
    assert not core.dead
    assert_calm(core)


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (lambda core: submit(core, 1, (0, 1)), "ranks 0-1 must be idle"),
        (lambda core: die(core, 1), "`%dist_heal`, then resize"),
        (lambda core: core.heal(0.0), "being healed"),
    ],
    ids=["busy", "dead", "healing"],
)
def test_mesh_is_not_resized_while_it_is(begin: Callable[[Core], object], why: str) -> None:
    core = ready_core(2)
    begin(core)
    assert why in core.why_not_resize(3)
