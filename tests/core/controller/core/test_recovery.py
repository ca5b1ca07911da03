"""How a mesh comes back: only when it must, with whom, and what waits meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.core import Answer, Change, Core, Finish, HealReport, Note
from cellmesh.controller.core.effects import Send, describe_heal
from cellmesh.controller.core.mesh_state import HostLost, Returned
from cellmesh.controller.core.recovery import FIRST_HEAL, RESPAWN_S
from cellmesh.controller.core.recovery_state import PATIENCE_S
from cellmesh.controller.core.requests import ANSWER_S
from cellmesh.controller.core.runs import STOP_S
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Blueprint, Describe, Heal
from cellmesh.wire.messages import Died, Done, Interrupt, Kill, Ranked, Release, Respawn, Resume
from cellmesh.wire.status import Probe, RankInfo

from ....support.core_decisions import (
    FAILED,
    answer_probe,
    counted,
    failed,
    heal_all,
    hear,
    lose_rank,
    of,
    only,
    ready_core,
    running_core,
    told,
)
from ....support.recovery_cases import (
    KILLED,
    asked_of_agent,
    assert_calm,
    die,
    drive,
    healed_by_user,
    healing_core,
    reports,
    respawned,
    started,
    state,
    submit,
    told_of_heals,
)
from ....support.runs import relay

# ---- only then


def test_after_a_failure_ranks_whose_groups_agree_go_on() -> None:
    core = running_core(2, (0, 1))
    assert told(hear(core, (0,), FAILED)) == []
    effects = answer_probe(core, hear(core, (1,), Done(1)), 0.0, counts=counted(3))
    assert told(effects) == [((0,), Resume())]
    assert of(Note, effects) == of(Change, effects) == []
    assert_calm(core)


@pytest.mark.parametrize(
    "facts",
    [
        {"is_broken": {1: True}},
        {"counts": {0: counted(3), 1: counted(2)}},
        {"counts": {0: counted(3, num_sent=((1, 1),)), 1: counted(3)}},
    ],
    ids=["broken", "collectives", "messages"],
)
def test_after_a_failure_groups_that_disagree_are_healed(facts: Any) -> None:
    core = running_core(2, (0, 1), new_generation=lambda: 42, dims={"dp": 2})
    hear(core, (0,), FAILED)
    effects = answer_probe(core, hear(core, (1,), Done(1)), 0.0, **facts)
    assert told(effects) == [((0, 1), Heal(FIRST_HEAL + 42, 42, (0, 1), b"", ("dp",), (2,)))]
    assert hear(core, (0,), Done(FIRST_HEAL + 42), 0.1) == []
    effects = hear(core, (1,), Done(FIRST_HEAL + 42), 0.1)
    assert told(effects) == []  # they go on by themselves
    [note] = of(Note, effects)
    assert note.run == 1
    assert "rebuilt" in note.text
    assert [change.cause.healed for change in of(Change, effects)] == [True]
    assert_calm(core)


def test_a_run_that_ended_well_is_not_looked_at() -> None:
    core = running_core(2, (0, 1))
    assert hear(core, (0, 1), Done(1, None, counted(2)))[1:] == [Finish(1)]
    assert_calm(core)


def test_released_or_interrupted_rank_is_examined_even_if_its_code_went_on() -> None:
    core = running_core(2, (0, 1))
    core.interrupt([1], 0.0)
    effects = hear(core, (0, 1), Done(1))
    assert only(Heal, answer_probe(core, effects, 0.0, is_broken=True))[0] == (0, 1)


def test_counts_that_disagree_after_a_run_are_healed_before_the_next_on_the_members() -> None:
    core = running_core(3, (0, 1, 2))
    hear(core, (0,), Done(1, None, counted(3)))
    hear(core, (1, 2), Done(1, None, counted(2)))
    assert started(submit(core, 2, (0, 1))) == [((0, 1), 2)]
    hear(core, (0, 1), Done(2))
    effects = submit(core, 3, (0, 1, 2))
    assert started(effects) == []
    counts = {0: counted(3), 1: counted(2), 2: counted(2)}
    ranks, heal = only(Heal, answer_probe(core, effects, 0.0, counts=counts))
    assert ranks == (0, 1, 2)
    assert started(hear(core, ranks, Done(heal.run))) == [((0, 1, 2), 3)]
    hear(core, ranks, Done(3))
    assert_calm(core)


def test_counts_that_seemed_to_disagree_cost_one_look() -> None:
    core = running_core(2, (0, 1))
    hear(core, (0,), Done(1, None, counted(3)))
    hear(core, (1,), Done(1))
    effects = submit(core, 2, (0, 1))
    assert started(answer_probe(core, effects, 0.0, counts=counted(3))) == [((0, 1), 2)]
    hear(core, (0, 1), Done(2))
    assert_calm(core)


# ---- who takes part


def test_running_rank_has_no_part_in_a_heal_until_idle() -> None:
    core = running_core(3, (2,), (0, 1))
    effects = hear(core, (0, 1), failed(2))
    ranks, first = only(Heal, answer_probe(core, effects, 0.0, busy={2: 1}, is_broken=True))
    assert ranks == (0, 1)
    hear(core, ranks, Done(first.run))
    effects = hear(core, (2,), Done(1))
    ranks, second = only(Heal, answer_probe(core, effects, 0.0))
    assert ranks == (0, 1, 2)
    assert second.generation != first.generation
    hear(core, ranks, Done(second.run))
    assert_calm(core)


def test_rank_with_work_in_flight_is_not_idle() -> None:
    core = running_core(3, (0, 1), (2,))
    effects = hear(core, (0, 1), FAILED)
    ranks, _ = only(Heal, answer_probe(core, effects, 0.0, is_broken=True))
    assert ranks == (0, 1)


def test_silent_rank_is_healed_before_its_next_run() -> None:
    core = running_core(3, (0, 1))
    _, probe = only(Probe, hear(core, (0, 1), FAILED))
    for rank in (0, 1):
        hear(core, (rank,), state(probe.request, is_broken=True))
    ranks, heal = only(Heal, core.tick(ANSWER_S))
    assert ranks == (0, 1)
    hear(core, ranks, Done(heal.run), 1.0)
    assert started(submit(core, 2, (0, 1), 1.0)) == [((0, 1), 2)]
    assert told(hear(core, (0, 1), Done(2), 1.0)) == []
    effects = submit(core, 3, (2,), 1.0)
    ranks, heal = only(Heal, answer_probe(core, effects, 1.0))
    assert ranks == (0, 1, 2)
    assert started(hear(core, ranks, Done(heal.run), 1.0)) == [((2,), 3)]


def test_holding_rank_stays_until_the_failed_run_has_ended_everywhere() -> None:
    core = running_core(4, (0, 1), (0,), (2, 3), on_error="wait")
    hear(core, (0,), FAILED)
    effects = hear(core, (2, 3), failed(3))
    ranks, heal = only(Heal, answer_probe(core, effects, 0.0, busy={1: 1}, is_broken=True))
    assert ranks == (2, 3)
    assert told(hear(core, ranks, Done(heal.run))) == []
    heal_all(core, hear(core, (1,), Done(1)))
    assert of(Finish, hear(core, (0,), Done(2))) == [Finish(2)]


def test_rank_that_fails_during_an_examination_is_examined_next() -> None:
    core = running_core(3, (0, 1), (2,))
    effects = hear(core, (0, 1), FAILED)
    hear(core, (2,), failed(2))
    effects = answer_probe(core, effects, 0.0)
    assert [type(verb) for _, verb in told(effects)] == [Probe]
    assert told(answer_probe(core, effects, 0.0)) == [((0, 1, 2), Resume())]
    assert_calm(core)


def test_rank_that_ends_its_run_during_a_heal_is_healed_next() -> None:
    core = running_core(3, (0, 1), (2,))
    effects = hear(core, (0, 1), FAILED)
    hear(core, (2,), Done(2))
    ranks, heal = only(Heal, answer_probe(core, effects, 0.0, busy={2: 2}, is_broken=True))
    assert ranks == (0, 1)
    effects = hear(core, ranks, Done(heal.run))
    assert only(Heal, answer_probe(core, effects, 0.0))[0] == (0, 1, 2)


# ---- work meanwhile


def test_work_waits_for_calm_and_keeps_its_order() -> None:
    core, heal = healing_core()
    assert submit(core, 2, (0, 1)) == []
    assert submit(core, 3, (2,)) == []
    effects = hear(core, (0, 1, 2), Done(heal.run))
    assert started(effects) == [((0, 1), 2), ((2,), 3)]


def test_work_for_control_threads_does_not_wait() -> None:
    core, _ = healing_core()
    [send] = core.submit(relay(2, (0,), "control"))
    assert send.parcel.verb.channel == "control"


def test_work_that_waited_goes_only_to_those_that_were_there_all_the_time() -> None:
    core = ready_core(3, auto_heal=True)
    effects = die(core, 0)
    submit(core, 1, (1, 2))
    effects += die(core, 2)
    effects = drive(core, effects)
    assert started(effects) == [((1,), 1)]


def test_work_for_a_missing_rank_tries_its_replacement_again() -> None:
    core = ready_core(2)
    healed_by_user(core)
    die(core, 0)
    late = PATIENCE_S + 2 * ANSWER_S
    for now in range(1, int(late)):  # rank 1 does not answer
        assert asked_of_agent(core.tick(now), Respawn) == []
    effects = submit(core, 1, (0,), late)
    assert started(effects) == []
    assert started(drive(core, effects, late)) == [((0,), 1)]


def test_work_for_a_rank_that_cannot_be_replaced_ends() -> None:
    core = ready_core(2)
    healed_by_user(core)
    die(core, 0)
    core.tick(ANSWER_S)
    core.tick(2 * ANSWER_S)
    effects = submit(core, 1, (0,), 5.0) + core.tick(5.0 + ANSWER_S)
    assert of(Finish, effects) == [Finish(1)]


# ---- deaths


def test_after_a_death_the_others_are_healed() -> None:
    core = ready_core(3)
    ranks, heal = only(Heal, answer_probe(core, die(core, 1), 0.0))
    assert ranks == (0, 2)
    hear(core, ranks, Done(heal.run))
    assert_calm(core)


def test_after_a_death_its_run_ends_first() -> None:
    core = running_core(3, (0, 1))
    assert told(die(core, 1)) == []
    assert only(Probe, hear(core, (0,), FAILED))[0] == (0, 2)


def test_a_rank_that_dies_after_its_part_in_a_run_is_not_waited_for() -> None:
    core = running_core(3, (0, 1))
    hear(core, (1,), Done(1))
    assert only(Heal, answer_probe(core, die(core, 1), 0.0, busy={0: 1}))[0] == (2,)


def test_a_question_to_a_control_thread_does_not_keep_a_death_from_being_healed() -> None:
    core = ready_core(3)
    core.submit(relay(1, (0, 1), "control"))
    assert only(Probe, die(core, 1))[0] == (0, 2)


def test_death_reported_twice_is_healed_once() -> None:
    core = ready_core(3)
    lose_rank(core, Died(1, KILLED, ""))
    assert told(die(core, 1)) == []


def test_dead_ranks_are_replaced_and_learn_of_the_groups() -> None:
    core = ready_core(3)
    lose_rank(core, Died(1, KILLED, ""))
    request, effects = core.heal(5.0)
    assert asked_of_agent(answer_probe(core, effects, 5.0), Respawn) == [Respawn((1,))]
    assert core.deadline() == 5.0 + RESPAWN_S
    effects = respawned(core, 1, now=5.1)
    assert core.dead == {}
    ranks, describe = only(Describe, answer_probe(core, effects, 5.1))
    assert ranks == (0,)
    ranks, heal = only(Heal, hear(core, (0,), Blueprint(describe.request, b"the groups"), 5.2))
    assert ranks == heal.ranks == (0, 1, 2)
    assert heal.blueprint == b"the groups"
    effects = hear(core, ranks, Done(heal.run, notes=("gradients are dropped",)), 5.5)
    [answer] = of(Answer, effects)
    report = HealReport((1,), True, "", 0.5, notes=("gradients are dropped",))
    assert answer == Answer(request, report)
    assert describe_heal(answer.value).endswith("; gradients are dropped")
    assert_calm(core)


def test_if_all_are_dead_the_new_ones_make_the_meshs_own_groups() -> None:
    core = ready_core(2)
    lose_rank(core, Died(0, KILLED, ""))
    die(core, 1)
    effects = healed_by_user(core)
    assert asked_of_agent(effects, Respawn) == [Respawn((0, 1))]
    ranks, heal = only(Heal, answer_probe(core, respawned(core, 0, 1), 0.0))
    assert (ranks, heal.blueprint) == ((0, 1), b"")


def test_auto_heal_replaces_dead_ranks_without_a_request() -> None:
    core = ready_core(3, auto_heal=True)
    assert [report.respawned for report in told_of_heals(drive(core, die(core, 1)))] == [(1,)]
    assert core.dead == {}
    assert_calm(core)


def test_rank_killed_for_not_stopping_is_replaced() -> None:
    core = running_core(2, (0, 1))
    core.interrupt([1], 0.0)
    core.interrupt([1], 0.1)
    hear(core, (0,), failed(1, "KeyboardInterrupt"), 0.2)
    effects = [*core.tick(STOP_S), *die(core, 1, STOP_S + 0.1)]
    assert asked_of_agent(effects, Kill) == [Kill((1,))]
    effects = drive(core, effects, STOP_S + 0.1)
    [note] = of(Note, effects)
    assert note.run == 1
    assert "rank 1 is new" in note.text
    assert core.dead == {}
    assert_calm(core)


# ---- asked for


def test_a_mesh_that_is_well_is_not_healed() -> None:
    core = ready_core(2)
    request, effects = core.heal(1.0)
    effects = answer_probe(core, effects, 1.5)
    assert effects == [Answer(request, HealReport(took_s=0.5))]


def test_refused_heal_names_the_runs_of_busy_ranks() -> None:
    core = ready_core(3)
    core.submit(relay(1, (0, 2), title="cell 3"))
    [report] = reports(healed_by_user(core))
    assert "ranks 0,2 must be idle for that, and ranks 0,2 run cell 3" in report.failure


def test_ranks_that_are_about_to_be_released_are_waited_for() -> None:
    core = running_core(3, (0, 1, 2))
    die(core, 1)
    assert healed_by_user(core, 0.1) == []
    assert only(Release, core.tick(1.0))[0] == (0, 2)
    core.receive(Parcel(Ranked((0,), FAILED)), 1.1)
    effects = drive(core, hear(core, (2,), FAILED, 1.1), 1.1)
    [report] = reports(effects)
    assert (report.respawned, report.failure) == ((1,), "")
    assert_calm(core)


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)])
def test_a_heal_that_waits_is_not_answered_by_a_look_at_others(ranks: tuple[int, ...]) -> None:
    core = running_core(4, ranks)
    die(core, 1)
    assert healed_by_user(core, 0.1) == []
    hear(core, ranks[2:], FAILED, 0.15)  # rank 2 holds back, and rank 0 is yet to leave the run
    submit(core, 3, (3,), 0.2)
    assert reports(drive(core, hear(core, (3,), failed(3), 0.3), 0.3)) == []
    [report] = reports(drive(core, hear(core, (0,), FAILED, 0.9), 0.9))
    assert (report.respawned, report.failure) == ((1,), "")


def test_ranks_that_do_not_end_a_failed_run_are_not_waited_for_without_end() -> None:
    core = ready_core(2)
    core.submit(relay(1, (0, 1), title="cell 3"))
    die(core, 1)
    assert healed_by_user(core, 0.1) == []
    submit(core, 2, (0, 1), 0.2)  # would wait for the new rank
    core.tick(1.0)  # rank 0 is released, and goes on
    effects = core.tick(1.0 + PATIENCE_S)
    [report] = reports(effects)
    assert "rank 0 runs cell 3" in report.failure
    assert started(effects) == [((0,), 2)]
    assert told(hear(core, (0,), FAILED, 9.0)) != []  # what has waited is looked at
    assert core.dead


def test_a_rank_that_is_late_to_answer_is_asked_again() -> None:
    core = ready_core(2)
    die(core, 1)
    assert reports(healed_by_user(core, 1.0)) == []
    [report] = reports(drive(core, core.tick(1.0 + ANSWER_S), 2.5))
    assert (report.respawned, report.failure) == ((1,), "")


def test_rank_whose_end_of_run_is_on_its_way_is_asked_again() -> None:
    core = ready_core(2)
    lose_rank(core, Died(1, KILLED, ""))
    _, probe = only(Probe, healed_by_user(core, 1.0))
    again = hear(core, (0,), state(probe.request, run=7), 1.1)
    [report] = reports(drive(core, again, 1.2))
    assert (report.respawned, report.failure) == ((1,), "")


def test_rank_is_not_asked_again_after_the_heal_was_abandoned() -> None:
    core = ready_core(2)
    lose_rank(core, Died(1, KILLED, ""))
    healed_by_user(core, 1.0)
    core.abandon_heal()
    [report] = reports(core.tick(1.0 + ANSWER_S))
    assert "rank 0 did not say so" in report.failure


def test_heal_does_not_wait_for_ranks_that_are_not_released() -> None:
    core = running_core(2, (0, 1), on_error="wait")
    die(core, 1)
    core.tick(1.0)
    [report] = reports(healed_by_user(core, 1.1))
    assert "rank 0 must be idle" in report.failure
    core.interrupt([1], 1.2)
    assert healed_by_user(core, 1.3) == []


def test_waiting_heal_can_be_abandoned() -> None:
    core = running_core(2, (0, 1))
    die(core, 1)
    healed_by_user(core, 0.1)
    assert len(reports(core.abandon_heal())) == 1
    drive(core, hear(core, (0,), FAILED, 1.1), 1.1)
    assert core.dead


@pytest.mark.parametrize("gives_up", [True, False])
def test_auto_healed_rank_is_replaced_after_a_refused_heal(gives_up: bool) -> None:
    core = running_core(3, (0, 1, 2), auto_heal=True)
    die(core, 2, 0.1)
    assert healed_by_user(core, 0.2) == []
    submit(core, 2, (0, 1, 2), 0.3)
    core.tick(1.1)  # ranks 0 and 1 are released, and go on
    effects = core.abandon_heal() if gives_up else core.tick(1.1 + PATIENCE_S)
    assert "must be idle" in reports(effects)[0].failure
    assert started(effects) == []  # for the new rank
    assert core.deadline() is None or core.deadline() > 1.1
    effects = drive(core, hear(core, (0, 1), FAILED, 20.0), 20.0)
    assert started(effects) == [((0, 1, 2), 2)]
    assert core.dead == {}


def test_rank_killed_for_not_stopping_is_replaced_after_a_refused_heal() -> None:
    core = running_core(2, (0, 1))
    die(core, 1)
    healed_by_user(core, 0.1)
    core.interrupt([1], 0.2)
    core.interrupt([1], 0.3)
    assert asked_of_agent(core.tick(0.2 + STOP_S), Kill) == [Kill((0,))]
    core.abandon_heal()
    assert asked_of_agent(drive(core, die(core, 0, 3.0), 3.0), Respawn) == [Respawn((0,))]
    assert set(core.dead) == {1}  # nobody asks for it any longer


def test_heal_report_names_ranks_without_an_answer() -> None:
    core, now = ready_core(2), 0.0
    effects = healed_by_user(core)
    while not reports(effects):  # it is asked again, but not without end
        assert now < PATIENCE_S + 2 * ANSWER_S
        now += ANSWER_S
        request = only(Probe, effects)[1].request
        effects = hear(core, (0,), state(request)) + core.tick(now)
    assert "rank 1" in reports(effects)[0].failure


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_mesh_that_is_not_there_is_not_healed(is_ready: bool) -> None:
    core = ready_core(2) if is_ready else Core(2)
    if is_ready:
        core.agent_ended("stopped")
    assert reports(healed_by_user(core))[0].failure


def test_rank_that_returned_in_a_run_that_is_over_is_interrupted_until_it_leaves_it() -> None:
    core = ready_core(2, settle_s=0.0)
    core.receive(Parcel(HostLost("b", (1,), "not heard")), 0.0)
    core.receive(Parcel(Returned((RankInfo(1, 101, "b", "running"),))), 1.0)
    effects, found = healed_by_user(core, 1.0), []
    for now in (1.0, 1.5, 2.5, 3.0, 4.0):
        effects = answer_probe(
            core, effects if of(Send, effects) else core.tick(now), now, busy={1: 77}
        )
        found += [(now, verb) for _, verb in told(effects) if type(verb) is Interrupt]
    assert found == [(2.5, Interrupt(77)), (4.0, Interrupt(77))]
