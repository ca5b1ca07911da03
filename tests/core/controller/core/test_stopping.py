"""Where the ranks of a run that is stopped end, and which of them go on until then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest

from cellmesh.controller.core import stopping
from cellmesh.controller.core.core import Core, Note
from cellmesh.controller.core.stopping import (
    IN_STEP_LIMIT_S,
    LIMIT_S,
    LOOK_S,
    QUIET_S,
    STANDING,
    STEPS_LIMIT_S,
    Stopping,
    Verdict,
    describe_steps,
)
from cellmesh.wire.groups import GroupCount
from cellmesh.wire.messages import Failing, Interrupt
from cellmesh.wire.stopping import QUIET_MAX_S, Owed, Pause, StepCount, Steps, StopState, owes

from ....support.core_decisions import failed, hear, of, running_core, told

WORLD = "0"


def at_gate(*counts: GroupCount, run: int = 1) -> StopState:
    return StopState(run, True, False, False, 0.0, counts)


def in_python(*counts: GroupCount, quiet_s: float = 0.0, **options: Any) -> StopState:
    return StopState(1, False, False, options.pop("in_step", False), quiet_s, counts, **options)


def waiting(*counts: GroupCount) -> StopState:
    return StopState(1, False, True, False, 0.0, counts)


def all_reduces(number: int, ranks: tuple[int, ...] = (), name: str = WORLD) -> GroupCount:
    return GroupCount(name, ranks, number)


def steps(number: int, name: str = "o", model: str = "m") -> Steps:
    return Steps(1, (StepCount("Adam 1", number, name, model),))


def stopping_of(num_ranks: int) -> Stopping:
    made = Stopping(num_ranks, 0.0)
    made.add(1, range(num_ranks))
    return made


def test_the_table_names_each_phase_and_event() -> None:
    phases, events = set(get_args(stopping.RankPhase)), set(get_args(stopping.RankEvent))
    assert {phase for phase, _ in STANDING} == phases - {"ended"}
    assert {event for _, event in STANDING} == events
    assert set(STANDING.values()) <= phases


def stepped(number: int, name: str = WORLD) -> StopState:
    return msgspec.structs.replace(at_gate(all_reduces(9, name=name)), steps=steps(number))


QUIET_STEPS: dict[str, Any] = {"quiet_s": 3.0, "has_begun": True}
# What each rank reports in turn, and what is decided at which time.
DECISIONS: dict[str, tuple[list[StopState], list[tuple[float, Verdict | None]]]] = {
    "at the same operation": (
        [at_gate(all_reduces(4)), at_gate(all_reduces(4))],
        [(0.0, Verdict(True))],
    ),
    "steps that differ by many": ([stepped(4), stepped(9)], [(0.0, Verdict(True))]),
    "Python, after a while": (
        [at_gate(all_reduces(4)), in_python(all_reduces(4))],
        [(QUIET_S - 0.01, None), (QUIET_S, Verdict(True, (1,)))],
    ),
    "no operations, of which nothing is said": (
        [in_python(quiet_s=QUIET_MAX_S), in_python(quiet_s=QUIET_MAX_S)],
        [(0.0, Verdict(True))],
    ),
    "an operation that Python owes": (
        [waiting(all_reduces(5)), in_python(all_reduces(4))],
        [(LIMIT_S - 0.01, None), (LIMIT_S, Verdict(False, (0, 1)))],
    ),
    "Python behind one that waits": (
        [waiting(all_reduces(5)), in_python(all_reduces(5), quiet_s=QUIET_MAX_S)],
        [(LIMIT_S - 0.01, None), (LIMIT_S, Verdict(False, (0, 1)))],
    ),
    "inside an optimizer's step": (
        [at_gate(all_reduces(4)), in_python(all_reduces(4), in_step=True)],
        [(LIMIT_S, None), (LIMIT_S + LOOK_S, None), (IN_STEP_LIMIT_S, Verdict(False, (1,)))],
    ),
    "Python with different steps": (
        [in_python(all_reduces(4), steps=steps(n), **QUIET_STEPS) for n in (1, 2)],
        [(STEPS_LIMIT_S - 0.01, None), (STEPS_LIMIT_S, Verdict(True, (0, 1)))],
    ),
}


@pytest.mark.parametrize(("reports", "decided"), DECISIONS.values(), ids=DECISIONS)
def test_where_ranks_end(reports: list[StopState], decided: list[tuple[float, Any]]) -> None:
    ranks = stopping_of(len(reports))
    assert ranks.decide(0.0) is None
    for rank, state in enumerate(reports):
        assert ranks.report((rank,), state, 0.0) == {}
    assert [(now, ranks.decide(now)) for now, _ in decided] == decided


def test_a_rank_with_one_step_less_goes_on_though_it_owes_no_operation() -> None:
    ranks = stopping_of(2)
    behind = msgspec.structs.replace(at_gate(all_reduces(9, (0,), "a")), steps=steps(4))
    ahead = msgspec.structs.replace(at_gate(all_reduces(9, (1,), "b")), steps=steps(5))
    ranks.report((0,), behind, 0.0)
    assert ranks.report((1,), ahead, 0.0) == {0: Owed((), (("Adam 1", 5),))}
    assert ranks.decide(0.0) is None
    ranks.report((0,), msgspec.structs.replace(behind, steps=steps(5)), 0.1)
    assert ranks.decide(0.1) == Verdict(True)


def test_a_message_that_was_sent_is_received_and_the_other_way_round() -> None:
    ranks = stopping_of(2)
    ranks.report((0,), at_gate(GroupCount(WORLD, (), 0, ((1, 3),), ((1, 2),))), 0.0)
    found = ranks.report((1,), at_gate(GroupCount(WORLD, (), 0, ((0, 1),), ((0, 2),))), 0.0)
    assert found == {1: Owed((GroupCount(WORLD, (), 0, ((0, 2),), ((0, 3),)),))}


@pytest.mark.parametrize(
    ("own", "is_owing"),
    [
        ((), True),
        ((GroupCount(WORLD, (), 3, ((1, 2),)),), True),
        ((GroupCount(WORLD, (), 2, ((1, 2),), ((1, 1),)),), True),
        ((GroupCount(WORLD, (), 3, ((1, 5),), ((1, 1),)),), False),
    ],
)
def test_owing_is_seen_on_the_rank_as_in_the_core(own: Any, is_owing: bool) -> None:
    assert owes(own, (GroupCount(WORLD, (), 3, ((1, 2),), ((1, 1),)),)) == is_owing


def test_a_rank_may_be_on_its_way_to_the_first_operation_of_a_run_that_has_just_begun() -> None:
    ranks = Stopping(2, 1.0)
    ranks.add(1, range(2), began_at=0.9)
    ranks.report((0,), at_gate(all_reduces(4)), 1.0)
    ranks.report((1,), in_python(all_reduces(4), quiet_s=QUIET_MAX_S), 1.0)
    assert ranks.decide(1.01) is None
    assert ranks.decide(0.89 + QUIET_S) is None
    assert ranks.decide(0.91 + QUIET_S) == Verdict(True, (1,))


def test_ranks_that_have_ended_are_not_waited_for_and_what_they_began_is_owed() -> None:
    ranks = stopping_of(2)
    ranks.report((0,), at_gate(all_reduces(4)), 0.0)
    assert ranks.end(1, (1,), (all_reduces(5),)) == {0: Owed((all_reduces(5),))}
    assert ranks.decide(0.1) is None
    ranks.report((0,), at_gate(all_reduces(5)), 0.2)
    assert ranks.decide(0.2) == Verdict(True)
    ranks.end(1, (0,), ())
    assert ranks.is_over
    assert ranks.decide(0.3) is None


# ---- programs, with ranks that are paused at random instants

Program = Sequence[tuple[str, tuple[int, ...]]]  # collectives: group, members


def simulate(programs: Sequence[Program], seed: int) -> list[dict[str, int]]:
    """Let ranks execute programs that wait in each collective, stop them all, and return how many
    each has begun by group when all are to end.
    """
    rng, num_ranks = random.Random(seed), len(programs)
    place, counts = [0] * num_ranks, [dict[str, int]() for _ in programs]
    members = {group: ranks for program in programs for group, ranks in program}
    waits: list[str | None] = [None] * num_ranks
    owed: list[Any] = [None] * num_ranks  # None: not asked to pause yet
    core = stopping_of(num_ranks)

    def counts_of(rank: int) -> tuple[GroupCount, ...]:
        return tuple(GroupCount(g, members[g], n) for g, n in sorted(counts[rank].items()))

    def report(rank: int, is_paused: bool) -> None:
        state = StopState(1, is_paused, waits[rank] is not None, False, 0.0, counts_of(rank))
        for other, more in core.report((rank,), state, 0.0).items():
            owed[other] = more

    def advance(rank: int) -> None:
        group = waits[rank]
        if group is not None:
            number = counts[rank][group]
            if any(counts[other].get(group, 0) < number for other in members[group]):
                return
            waits[rank] = None
        if place[rank] == len(programs[rank]):
            return
        if owed[rank] is not None and not owes(counts_of(rank), owed[rank].counts):
            report(rank, is_paused=True)
            return
        group = programs[rank][place[rank]][0]
        place[rank] += 1
        counts[rank][group] = counts[rank].get(group, 0) + 1
        waits[rank] = group
        if owed[rank] is not None:
            report(rank, is_paused=False)

    for _ in range(rng.randrange(40 * num_ranks)):
        advance(rng.randrange(num_ranks))
    for rank in rng.sample(range(num_ranks), num_ranks):
        for _ in range(rng.randrange(4)):
            advance(rng.randrange(num_ranks))
        owed[rank] = owed[rank] or Owed()
        report(rank, is_paused=False)
    for _ in range(2000 * num_ranks):
        if core.decide(0.0) is not None:
            assert not any(waits), "a rank ends in the middle of an operation"
            return counts
        advance(rng.randrange(num_ranks))
    raise AssertionError("the ranks did not come to the same point")


def grid(rows: int, columns: int) -> list[Program]:
    programs: list[Program] = []
    everyone = tuple(range(rows * columns))
    for row, column in itertools.product(range(rows), range(columns)):
        dp, tp = everyone[column::columns], everyone[row * columns : (row + 1) * columns]
        step = [(f"tp{row}", tp), (f"dp{column}", dp), (f"tp{row}", tp), ("w", everyone)]
        programs.append(step * 100)
    return programs


@pytest.mark.parametrize("programs", [grid(2, 2), grid(3, 4)], ids=len)
@pytest.mark.parametrize("seed", range(25))
def test_members_have_begun_the_same_number(programs: list[Program], seed: int) -> None:
    counts = simulate(programs, seed)
    for program, own in zip(programs, counts, strict=True):
        for group, members in program:
            assert all(counts[member].get(group, 0) == own.get(group, 0) for member in members)


# ---- in the core


def test_a_run_is_paused_then_ended_on_all_ranks_together() -> None:
    core = running_core(3, (0, 1, 2))
    assert told(core.interrupt([1], 5.0)) == [((0, 1, 2), Pause(1))]
    assert hear(core, (0, 1), at_gate(all_reduces(7)), 5.01) == []
    effects = hear(core, (2,), at_gate(all_reduces(8)), 5.02)
    assert told(effects) == [((0, 1), Pause(1, Owed((all_reduces(8),))))]
    effects = hear(core, (0, 1), at_gate(all_reduces(8)), 5.03)
    assert told(effects) == [((0, 1, 2), Interrupt(1, True))]


def stopped_core() -> Core:
    """Rank 0 waits in an operation, when the run is to stop."""
    core = running_core(2, (0, 1))
    core.interrupt([1], 5.0)
    hear(core, (0,), waiting(all_reduces(8)), 5.0)
    return core


def test_ranks_that_do_not_get_there_are_interrupted_as_they_are_and_named() -> None:
    core = stopped_core()
    hear(core, (1,), in_python(all_reduces(7)), 5.0)
    assert ((0, 1), Pause(1)) in told(core.tick(5.0 + LOOK_S))
    assert told(core.tick(5.0 + 1.5 * LOOK_S)) == []
    effects = core.tick(5.0 + LIMIT_S)
    assert told(effects) == [((0, 1), Interrupt(1))]
    [note] = of(Note, effects)
    assert note.text.startswith("ranks 0-1 did not get to the same operation within 1 s")


def test_a_second_press_or_a_rank_that_fails_ends_the_alignment() -> None:
    assert told(stopped_core().interrupt([1], 5.2)) == [((0, 1), Interrupt(1))]
    effects = hear(stopped_core(), (1,), failed(1), 5.1)
    assert told(effects) == [((0,), Interrupt(1))]
    assert of(Note, effects) == []
    effects = hear(stopped_core(), (1,), Failing(1), 5.1)  # the failure itself follows
    assert told(effects) == [((0,), Interrupt(1))]


# ---- optimizer steps


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((4, 4, 4, 5), "4 on ranks 0-2, 5 on rank 3 (o): `%dist_sync m --from 0`"),
        ((1, 2, 2), "1 on rank 0, 2 on ranks 1-2 (o): `%dist_sync m --from 1`"),
        ((1, 2, 3), "1 on rank 0, 2 on rank 1, 3 on rank 2 (o): `%dist_sync m --from 0`"),
        ((2, 2, 2), ""),
    ],
)
def test_differences_are_said_in_words(numbers: Sequence[int], text: str) -> None:
    found = describe_steps({rank: steps(number) for rank, number in enumerate(numbers)})
    words = "ranks have made different numbers of steps: "
    assert found.startswith(f"{words}{text}") if text else not found


def test_a_rank_without_the_optimizer_counts_in_a_first_step_only() -> None:
    assert "(Adam): %dist_check shows" in describe_steps({0: Steps(1), 1: steps(1, "", "")})
    assert not describe_steps({0: Steps(1), 1: steps(7), 2: steps(7)})
