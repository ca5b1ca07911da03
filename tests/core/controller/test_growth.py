"""The work of pure code grows in proportion to the number of ranks, not to its square."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from cellmesh.controller.core.group_progress import find_disagreements
from cellmesh.controller.core.stopping import LIMIT_S, LOOK_S
from cellmesh.controller.core.verdict import find_verdict
from cellmesh.controller.core.verdict_text import describe_waits
from cellmesh.controller.failure_summary import (
    describe_live,
    exception_of,
    explain_waits,
    summarize,
)
from cellmesh.controller.trace.history import merge
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Begun, GroupCount, InFlight
from cellmesh.wire.messages import Failed
from cellmesh.wire.status import RankState
from cellmesh.wire.stopping import StepCount, Steps, StopState
from cellmesh.wire.verbs import Output
from cellmesh.workers.agent.merger import Merger

from ...support.core_decisions import failed, hear, running_core
from ...support.step_counter import growth
from .trace.test_timeline import ALL, cell, told

Work = Callable[[int], Callable[[], Any]]
NUM_RANKS = 24


def check_linear(work: Work) -> None:
    assert growth(work, NUM_RANKS) < 6


# ---- where ranks wait


def in_operation(
    rank: int, name: str, number: int, peer: int = -1, root: int = -1, **messages: Any
) -> RankState:
    recent = () if messages else (Begun(number, name or "all_reduce", 4, "float32", root),)
    count = GroupCount("0", (), number, **messages, description="default_pg", recent=recent)
    waits = (InFlight("0", name, number, peer),) if name else ()
    where = (1, 1, 1, 1, "f", name, "cpu", 0, "0", 9.0 if name else 0.0)
    return RankState(*where, counts=(count,), in_flight=waits)


def making_a_group(rank: int, num: int) -> RankState:
    facts: dict[str, Any] = {"collective": "new_group", "waited_s": 9.0}
    facts |= {"group": "7", "making": tuple(range(num))}
    return msgspec.structs.replace(in_operation(rank, "", 0), **facts)


def in_a_ring(rank: int, num: int) -> RankState:
    before = (rank - 1) % num
    return in_operation(rank, "recv", 1, before, num_received=((before, 1),))


def late_half(name: str) -> Callable[[int, int], RankState]:
    """The ranks above the middle are in an operation that the others have not begun."""
    return lambda rank, num: (
        in_operation(rank, name, 2, root=0) if rank > num // 2 else in_operation(rank, "", 1)
    )


WAITS: dict[str, Callable[[int, int], RankState]] = {
    "for the other half": late_half("all_reduce"),
    "in a reduce": late_half("reduce"),
    "in a broadcast": late_half("broadcast"),
    "in two kinds": lambda rank, num: in_operation(rank, ("all_reduce", "all_gather")[rank % 2], 2),
    "in numbers of their own": lambda rank, _: in_operation(rank, "all_reduce", rank + 1),
    "in a ring": in_a_ring,
    "making a group": making_a_group,
    "for anyone": lambda rank, _: in_operation(rank, "recv_anysource", 1, num_received=((-1, 1),)),
}
Judge = Callable[[dict[int, RankState], Sequence[int], int], Any]
JUDGES: dict[str, Judge] = {
    "verdict": lambda states, gone, num: find_verdict(states, gone, num, 1.0, gone),
    "waits": lambda states, gone, num: describe_waits(states, gone, gone, num),
    "why": lambda states, gone, num: explain_waits(states, gone, num),
    "live line": lambda states, gone, num: describe_live(1, range(num), states),
    "disagreements": lambda states, gone, num: find_disagreements(
        {rank: states[rank].counts if rank in states else () for rank in range(num)}, num, True
    ),
}


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("half_is_gone", [False, True])
def test_why_ranks_wait(kind: str, judge: str, half_is_gone: bool) -> None:
    def work(num: int) -> Callable[[], Any]:
        gone = list(range(num // 2)) if half_is_gone else []
        states = {rank: WAITS[kind](rank, num) for rank in range(len(gone), num)}
        return lambda: JUDGES[judge](states, gone, num)

    check_linear(work)


# ---- the stop of a run, its end, its failure


def at(rank: int, is_paused: bool, number: int, quiet_s: float = 0.0, steps: int = 3) -> StopState:
    made = Steps(1, (StepCount("SGD 1", steps),))
    return StopState(1, is_paused, False, False, quiet_s, (GroupCount("0", (), number),), made)


def stop_with_debts(num: int) -> list[tuple[float, int, StopState]]:
    first = [(0.01, rank, at(rank, True, 4 + rank % 2)) for rank in range(num)]
    return [*first, *((0.02, rank, at(rank, True, 5)) for rank in range(0, num, 2))]


def test_a_stop() -> None:
    def work(num: int) -> Callable[[], Any]:
        core = running_core(num, tuple(range(num)))

        def stop() -> None:
            core.interrupt([1], 0.0)
            for now, rank, state in stop_with_debts(num):
                hear(core, (rank,), state, now)
            core.tick(LOOK_S)
            core.tick(LIMIT_S)
            for rank in range(num):
                hear(core, (rank,), failed(1, "KeyboardInterrupt"), LIMIT_S)

        return stop

    check_linear(work)


def test_the_summary_of_a_failed_run() -> None:
    def work(num: int) -> Callable[[], Any]:
        verbs = {rank: Failed(1, "ValueError", f"no {rank}", "", 4) for rank in range(num)}
        ended = {rank: exception_of(rank, Parcel(verb)) for rank, verb in verbs.items()}
        return lambda: summarize(ended, {rank: Parcel(verb) for rank, verb in verbs.items()})

    check_linear(work)


# ---- output, and the past


def test_messages_of_ranks() -> None:
    def work(num: int) -> Callable[[], Any]:
        merger = Merger()
        merger.expect(1, num)

        def take() -> None:
            for rank in range(num):
                merger.add(rank, Parcel(Output(1, "stdout", f"step\n{rank}\n")), 0.0)
                merger.deadline()
                merger.take(0.0)

        return take

    check_linear(work)


def test_timelines() -> None:
    def work(num: int) -> Callable[[], Any]:
        pasts = {
            rank: told([cell(1, 0, 200)], [(ALL, 1, 1, 1 + rank, 99), (ALL, 2, 1, 100, 120)])
            for rank in range(num)
        }

        def join() -> None:
            history = merge(pasts, {}, 4)
            history.describe()
            for rank in history.ranks:
                history.times(rank, history.cells[0])

        return join

    check_linear(work)
