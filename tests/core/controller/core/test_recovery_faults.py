"""What can go wrong in each phase of a recovery: it comes to an end that is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellmesh.controller.core.core import Change, Core, Effect, Finish, HealReport, Note, Send
from cellmesh.controller.core.recovery import ABANDON_S, HEAL_S, MAX_ATTEMPTS, RESPAWN_S
from cellmesh.controller.core.requests import ANSWER_S
from cellmesh.controller.core.runs import STOP_S
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Blueprint, Describe, Heal
from cellmesh.wire.messages import Died, Done, MeshReady, Release, Respawn, RespawnFailed, Resume
from cellmesh.wire.status import Probe

from ....support.core_decisions import (
    FAILED,
    answer_probe,
    failed,
    heal_all,
    hear,
    infos,
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
    describing_core,
    die,
    drive,
    healed_by_user,
    healing_core,
    reports,
    respawned,
    respawning_core,
    started,
    state,
    submit,
    told_of_heals,
)

# ---- what goes wrong while ranks are examined


def give_up_describing(core: Core) -> list[Effect]:
    """No rank describes its groups, as often as that is tried; the effects of the last time."""
    for attempt in range(1, MAX_ATTEMPTS):
        answer_probe(core, core.tick(attempt * ANSWER_S), attempt * ANSWER_S)
    return core.tick(MAX_ATTEMPTS * ANSWER_S)


def give_up_healing(core: Core, heal: Heal) -> list[Effect]:
    for _ in range(1, MAX_ATTEMPTS):
        effects = hear(core, (0, 1), failed(heal.run, "RuntimeError", "no way"))
        _, heal = only(Heal, answer_probe(core, effects, 0.0))
    return hear(core, (0, 1), failed(heal.run, "RuntimeError", "no way"))


def test_rank_that_dies_during_an_examination_is_left_out() -> None:
    core = running_core(3, (0, 1, 2))
    _, probe = only(Probe, hear(core, (0, 1, 2), FAILED))
    hear(core, (0, 2), state(probe.request))
    heal_all(core, die(core, 1))
    assert_calm(core)


def test_rank_that_never_answers_costs_a_second() -> None:
    core = running_core(2, (0, 1))
    _, probe = only(Probe, hear(core, (0, 1), FAILED))
    hear(core, (0,), state(probe.request))
    assert core.deadline() == ANSWER_S
    assert told(core.tick(ANSWER_S)) == [((0, 1), Resume())]
    assert_calm(core)


# ---- what goes wrong while ranks are forked


def test_failed_fork_is_reported_and_costs_nothing() -> None:
    core = respawning_core()
    assert submit(core, 1, (0, 2)) == []
    effects = heal_all(core, core.receive(Parcel(RespawnFailed((1,), "no memory")), 1.0), 1.0)
    [report] = reports(effects)
    assert "no memory" in report.failure
    assert not report.respawned
    assert started(effects) == [((0, 2), 1)]
    assert set(core.dead) == {1}


def test_slow_fork_is_given_up_and_may_arrive_later() -> None:
    core = respawning_core()
    effects = heal_all(core, core.tick(RESPAWN_S), RESPAWN_S)
    [report] = reports(effects)
    assert "too long" in report.failure
    assert_calm(core)
    effects = drive(core, respawned(core, 1, now=200.0), 200.0)
    assert told_of_heals(effects) == [HealReport((1,), True, "", 0.0)]
    assert_calm(core)


@pytest.mark.parametrize("num_requests", [1, 2])
def test_rank_that_dies_during_a_fork_is_replaced_next(num_requests: int) -> None:
    core = respawning_core()
    assert told(die(core, 2)) == []
    if num_requests == 2:
        healed_by_user(core)
    found = reports(drive(core, respawned(core, 1)))
    assert [(report.respawned, report.healed) for report in found] == [
        ((1, 2), True)
    ] * num_requests
    assert core.dead == {}
    assert_calm(core)


# ---- what goes wrong while a rank describes its groups


def test_another_rank_describes_the_groups_if_one_does_not_answer() -> None:
    core, (ranks, _) = describing_core()
    assert ranks == (0,)
    effects = core.tick(ANSWER_S)
    assert only(Describe, answer_probe(core, effects, ANSWER_S))[0] == (2,)


def test_heal_without_any_description_is_given_up_and_can_be_retried() -> None:
    core, _ = describing_core()
    [report] = reports(give_up_describing(core))
    assert "did not describe" in report.failure
    assert core.deadline() is None
    [report] = reports(drive(core, healed_by_user(core, 10.0), 10.0))
    assert (report.failure, report.healed) == ("", True)


def test_describing_rank_that_dies_is_replaced_and_another_describes() -> None:
    core, _ = describing_core()
    effects = answer_probe(core, die(core, 0), 0.0)
    assert asked_of_agent(effects, Respawn) == [Respawn((0,))]
    effects = answer_probe(core, respawned(core, 0), 0.0)
    assert only(Describe, effects)[0] == (2,)
    [report] = reports(heal_all(core, effects))
    assert report.respawned == (0, 1)


def test_new_rank_that_dies_during_the_heal_is_replaced_again() -> None:
    core, (_, describe) = describing_core()
    die(core, 1)
    effects = drive(core, hear(core, (0,), Blueprint(describe.request, b"x")))
    [report] = reports(effects)
    assert (report.respawned, report.failure) == ((1,), "")
    assert_calm(core)


def test_auto_healed_rank_that_dies_is_reported() -> None:
    core = running_core(2, (0, 1))
    core.interrupt([1], 0.0)
    core.interrupt([1], 0.0)
    hear(core, (0,), failed(1, "KeyboardInterrupt"))
    effects = heal_all(core, [*core.tick(STOP_S), *die(core, 1, STOP_S)], STOP_S)
    assert asked_of_agent(effects, Respawn) == [Respawn((1,))]
    effects = [*respawned(core, 1, now=STOP_S), *die(core, 1, STOP_S)]
    [note] = of(Note, heal_all(core, effects, STOP_S))
    assert "rank 1, which was new, was killed" in note.text
    assert_calm(core)


def test_new_ranks_wait_for_a_rank_that_can_describe_groups() -> None:
    core, _ = describing_core()
    give_up_describing(core)
    submit(core, 1, (1,), 10.0)
    submit(core, 2, (0, 2), 10.0)
    effects = hear(core, (1,), FAILED, 10.0)
    assert told(answer_probe(core, effects, 10.0, busy={0: 2, 2: 2})) == [((1,), Resume())]
    effects = answer_probe(core, hear(core, (0, 2), Done(2), 10.0), 10.0)
    assert only(Describe, effects)[0] == (0,)


# ---- what goes wrong while groups are healed


def test_heal_that_fails_on_one_rank_is_released_and_retried() -> None:
    core, heal = healing_core()
    effects = hear(core, (1,), failed(heal.run, "RuntimeError", "no"))
    assert told(effects) == [((0, 2), Release(heal.run))]
    assert told(hear(core, (0,), failed(heal.run, "Released"))) == []
    effects = hear(core, (2,), failed(heal.run, "Released"))
    ranks, second = only(Heal, answer_probe(core, effects, 0.0))
    assert ranks == (0, 1, 2)
    assert second.run != heal.run
    assert second.generation != heal.generation
    hear(core, ranks, Done(second.run))
    assert_calm(core)


def test_heal_in_which_a_rank_dies_is_released_and_goes_on_without_the_rank() -> None:
    core, heal = healing_core()
    assert told(die(core, 1)) == [((0, 2), Release(heal.run))]
    effects = hear(core, (0, 2), failed(heal.run, "Released"))
    ranks, second = only(Heal, answer_probe(core, effects, 0.0))
    assert ranks == (0, 2)
    effects = hear(core, ranks, Done(second.run))
    assert_calm(core)


def test_rank_that_dies_after_its_part_in_a_heal_is_left_out_of_the_next() -> None:
    core, heal = healing_core()
    hear(core, (1,), Done(heal.run))
    assert told(die(core, 1)) == []
    effects = hear(core, (0, 2), Done(heal.run))
    assert only(Heal, answer_probe(core, effects, 0.0))[0] == (0, 2)


def test_a_rank_that_dies_whenever_it_is_replaced_is_not_replaced_for_ever() -> None:
    core, num_respawns = ready_core(2, auto_heal=True), 0
    effects = die(core, 1)
    while effects:
        effects = answer_probe(core, effects, 0.0)
        while asked_of_agent(effects, Respawn):
            num_respawns += 1
            effects = of(Send, [*respawned(core, 1), *die(core, 1)])
            effects = answer_probe(core, effects[:1], 0.0)
        found = [verb for _, verb in told(effects) if type(verb) is Heal]
        effects = hear(core, (0,), Done(found[0].run)) if found else []
    assert num_respawns == MAX_ATTEMPTS
    assert_calm(core)


def test_healed_rank_at_work_has_no_part_in_the_next_attempt() -> None:
    core = running_core(2, (0, 1), (0, 1))
    effects = hear(core, (0, 1), FAILED)
    _, heal = only(Heal, answer_probe(core, effects, 0.0, is_broken=True))
    hear(core, (0,), Done(heal.run))  # and begins run 2
    effects = hear(core, (1,), failed(heal.run, "RuntimeError", "no"))
    assert only(Heal, answer_probe(core, effects, 0.0))[0] == (1,)


def test_a_heal_that_keeps_failing_is_given_up_until_the_end_of_the_next_run() -> None:
    core, heal = healing_core(2)
    submit(core, 2, (0,))
    effects = give_up_healing(core, heal)
    [note] = of(Note, effects)
    assert "no way" in note.text
    assert "%dist_restart" in note.text
    assert [change.cause.failure != "" for change in of(Change, effects)] == [True]
    assert told(effects)[0] == ((0, 1), Resume())
    assert started(effects) == [((0,), 2)]
    assert only(Heal, answer_probe(core, hear(core, (0,), Done(2)), 0.0))[0] == (0, 1)


def test_a_heal_that_takes_too_long_is_released_then_given_up() -> None:
    core, heal = healing_core(2)
    assert core.deadline() == HEAL_S
    assert told(core.tick(HEAL_S)) == [((0, 1), Release(heal.run))]
    hear(core, (0,), failed(heal.run, "Released"), HEAL_S)
    effects = core.tick(HEAL_S + ABANDON_S)
    [note] = of(Note, effects)
    assert "too long" in note.text
    assert told(effects) == [((0,), Resume())]
    assert core.deadline() is None
    # The one that hung is looked at when it comes back.
    effects = hear(core, (1,), failed(heal.run, "Released"), 100.0)
    ranks, second = only(Heal, answer_probe(core, effects, 100.0))
    assert ranks == (0, 1)
    hear(core, ranks, Done(second.run), 100.0)
    assert_calm(core)


def test_a_heal_that_the_user_no_longer_waits_for_is_released_once() -> None:
    core, heal = healing_core(2)
    assert told(core.abandon_heal()) == [((0, 1), Release(heal.run))]
    assert core.abandon_heal() == []
    effects = hear(core, (0, 1), failed(heal.run, "Released"))
    assert told(effects) == [((0, 1), Resume())]
    assert_calm(core)


ANSWERS: dict[type, Any] = {
    Probe: lambda verb: state(verb.request, is_broken=True),
    Describe: lambda verb: Blueprint(verb.request, b"x"),
    Heal: lambda verb: Done(verb.run),
}
ENDS: dict[str, Callable[[Core], list[Effect]]] = {
    "restart": lambda core: core.restart(),
    "stop": lambda core: [*core.stop(), *core.agent_ended("stopped")],
    "detached": lambda core: core.agent_ended("taken over"),
    "agent": lambda core: core.agent_ended("its process ended"),
}


@pytest.mark.parametrize("when", ["examining", "respawning", "describing", "healing"])
@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_all_ranks_ends_a_recovery(when: str, how: str) -> None:
    core = ready_core(3)
    lose_rank(core, Died(1, KILLED, ""))
    effects = healed_by_user(core)
    if when != "examining":
        effects = answer_probe(core, effects, 0.0)
    if when in ("describing", "healing"):
        effects = answer_probe(core, respawned(core, 1), 0.0)
    if when == "healing":
        effects = hear(core, (0,), Blueprint(only(Describe, effects)[1].request, b"x"))
    under_way = told(effects)
    submit(core, 1, (0, 2))
    ended = ENDS[how](core)
    assert len(reports(ended)) == 1
    assert of(Finish, ended) == [Finish(1)]
    assert told(ended) == []
    for ranks, verb in under_way:  # comes to nothing
        assert told(hear(core, ranks, ANSWERS[type(verb)](verb))) == []
    assert told(respawned(core, 1)) == []
    assert told(core.tick(1000.0)) == []
    if how == "restart":
        core.receive(Parcel(MeshReady(infos(3))), 1000.0)
        assert_calm(core)
    assert core.deadline() is None


def test_a_death_under_way_during_a_restart_is_none_of_the_new_ranks() -> None:
    core = ready_core(2)
    core.restart()
    die(core, 1)
    hear(core, (0,), FAILED)
    core.receive(Parcel(MeshReady(infos(2))), 1.0)
    assert core.dead == {}
    submit(core, 2, (0, 1))
    effects = hear(core, (0, 1), failed(2), 1.0)
    assert told(answer_probe(core, effects, 1.0)) == [((0, 1), Resume())]
