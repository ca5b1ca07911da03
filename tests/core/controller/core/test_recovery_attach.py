"""A controller that attaches finds a mesh in any state; and a store that is replaced."""

from __future__ import annotations

from cellmesh.controller.core.core import Core, Finish
from cellmesh.controller.core.recovery import FIRST_HEAL
from cellmesh.wire.attach import RunInfo, Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Describe, Heal
from cellmesh.wire.messages import Done, Failed, MeshReady, Respawn, Resume, StoreDied
from cellmesh.wire.status import Probe, RankInfo

from ....support.core_decisions import (
    answer_probe,
    counted,
    failed,
    heal_all,
    hear,
    of,
    only,
    ready_core,
    told,
)
from ....support.recovery_cases import (
    KILLED,
    asked_of_agent,
    assert_calm,
    attached_core,
    die,
    drive,
    healed_by_user,
    healing_core,
    reports,
    respawned,
)

# ---- the store


def test_groups_are_made_over_a_new_store() -> None:
    core = ready_core(2)
    effects = core.receive(Parcel(StoreDied(KILLED, 4321)), 0.0)
    ranks, heal = only(Heal, answer_probe(core, effects, 0.0))
    assert (ranks, heal.store_port) == ((0, 1), 4321)
    hear(core, ranks, Done(heal.run))
    assert_calm(core)


def test_a_new_store_while_groups_are_made_over_the_old_one() -> None:
    core, heal = healing_core(2)
    core.receive(Parcel(StoreDied(KILLED, 4321)), 0.0)
    effects = hear(core, (0, 1), Failed(heal.run, "RuntimeError", "store", "", 0))
    assert only(Heal, answer_probe(core, effects, 0.0))[1].store_port == 4321


def test_without_a_store_nothing_is_tried() -> None:
    core = ready_core(2)
    assert told(core.receive(Parcel(StoreDied(KILLED, 0)), 0.0)) == []


# ---- attaching


def test_attaching_controller_resumes_ranks_that_may_hold_back() -> None:
    core, effects = attached_core()
    assert told(answer_probe(core, effects, 0.0, counts=counted(2))) == [((0, 1), Resume())]
    assert_calm(core)


def test_attaching_controller_heals_broken_groups() -> None:
    core, effects = attached_core()
    effects = answer_probe(core, effects, 0.0, counts=counted(2), is_broken={0: True})
    assert only(Heal, effects)[0] == (0, 1)


def test_auto_heal_replaces_dead_ranks_at_attach() -> None:
    core, effects = attached_core(3, dead=(1,), auto_heal=True)
    effects = answer_probe(core, effects, 0.0, counts=counted(2))
    assert asked_of_agent(effects, Respawn) == [Respawn((1,))]


def test_attaching_controller_gets_the_end_of_runs_in_flight() -> None:
    core, effects = attached_core(3, runs=(RunInfo(7, (0, 1), "step()"),))
    effects = answer_probe(core, effects, 0.0, busy={0: 7, 1: 7}, counts=counted(2))
    assert told(effects) == [((2,), Resume())]
    effects = hear(core, (0,), failed(7))
    assert of(Finish, hear(core, (1,), Done(7))) == [Finish(7)]


def test_rank_with_a_run_in_flight_at_attach_may_be_about_to_begin() -> None:
    core, effects = attached_core(3, runs=(RunInfo(7, (1,), "step()"),))
    effects = answer_probe(core, effects, 0.0, counts=counted(2), is_broken=True)
    ranks, heal = only(Heal, effects)
    assert ranks == (0, 2)
    assert told(hear(core, ranks, Done(heal.run))) == [((1,), Resume())]
    effects = hear(core, (1,), Done(7))
    assert only(Heal, answer_probe(core, effects, 0.0, counts=counted(0)))[0] == (0, 1, 2)


def test_ranks_under_replacement_at_attach_join_later() -> None:
    core = Core(3)
    core.receive(Parcel(Welcome(1, 2, "host", next_run=8)), 0.0)
    ranks = tuple(RankInfo(r, 1, "host", "starting" if r == 1 else "idle") for r in range(3))
    effects = core.receive(Parcel(MeshReady(ranks)), 0.0)
    assert only(Probe, effects)[0] == (0, 2)
    heal_all(core, effects)
    assert set(core.dead) == {1}
    effects = respawned(core, 1)
    assert core.dead == {}
    assert only(Describe, answer_probe(core, effects, 0.0))[0] == (0,)


def test_attaching_controller_heals_where_ranks_are_dead() -> None:
    core, effects = attached_core(3, dead=(1,))
    assert set(core.dead) == {1}
    ranks, heal = only(Heal, answer_probe(core, effects, 0.0, counts=counted(2)))
    assert ranks == (0, 2)
    hear(core, ranks, Done(heal.run))
    assert told(die(core, 1)) == []  # the news that was kept
    effects = drive(core, healed_by_user(core))
    assert reports(effects)[0].respawned == (1,)


def test_attaching_controller_finds_ranks_without_groups() -> None:
    core, effects = attached_core(3)
    counts = {0: counted(2), 2: counted(2), 1: ()}
    effects = answer_probe(core, effects, 0.0, counts=counts, is_broken={0: True})
    ranks, _ = only(Describe, effects)
    assert ranks == (0,)


def test_failure_of_a_forgotten_run_holds_no_rank_back_for_ever() -> None:
    core = ready_core(2)
    effects = hear(core, (1,), failed(77, "E"))
    assert told(answer_probe(core, effects, 0.0)) == [((1,), Resume())]
    effects = hear(core, (1,), Failed(FIRST_HEAL + 77, "Released", "", "", 0))
    assert only(Heal, answer_probe(core, effects, 0.0, is_broken={1: True}))[0] == (0, 1)
