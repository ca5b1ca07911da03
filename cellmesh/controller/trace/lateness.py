"""Finds which rank begins collectives late, and how long others wait for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .operations import Match, Operation


@dataclass(frozen=True)
class Lateness:
    """How late one rank began the collectives that it shares with others.

    Attributes:
        rank: which.
        num_last: to how many it came last.
        num_missed: to how many it never came, although others of the group did.
        awaited_s: how long the ranks that had come before waited for it in these, added up.
        waited_s: how long it waited for others.
        num_others: how many other ranks there are.
    """

    rank: int
    num_last: int
    num_missed: int
    awaited_s: float
    waited_s: float
    num_others: int = 1

    @property
    def awaited_each_s(self) -> float:
        """How long each of the other ranks waited for it, on average."""
        return self.awaited_s / max(1, self.num_others)


def find_straggler(lateness: Mapping[int, Lateness], took_s: float) -> int | None:
    """Return the rank that began collectives noticeably later than the others; None if there is
    none.

    Args:
        lateness: of all ranks.
        took_s: how long they ran.
    """
    if not lateness:
        return None
    missed = max(lateness.values(), key=lambda one: one.num_missed)
    if missed.num_missed:
        return missed.rank
    worst = max(lateness.values(), key=lambda one: one.awaited_s)
    is_little = worst.awaited_s < 0.05 * took_s * max(1, len(lateness) - 1)
    return None if is_little or not worst.num_last else worst.rank


def describe_lateness(lateness: Mapping[int, Lateness], took_s: float) -> str:
    """Describe the rank that `find_straggler` finds; "" if no rank waited for another."""
    num = sum(one.num_last for one in lateness.values())
    straggler = find_straggler(lateness, took_s)
    if straggler is None:
        return f"no straggler: ranks began {num} collectives at about the same time" if num else ""
    worst = lateness[straggler]
    if worst.num_missed:
        what = "collective" if worst.num_missed == 1 else "collectives"
        return f"rank {worst.rank} never began {worst.num_missed} {what} that others waited in"
    return (
        f"rank {worst.rank} was last in {worst.num_last} of {num} collectives; "
        f"{_describe_share(worst, took_s)}"
    )


def _describe_share(worst: Lateness, took_s: float) -> str:
    each = "each other rank" if worst.num_others > 1 else "the other rank"
    waited_s = min(worst.awaited_each_s, took_s)
    if took_s >= 10:
        share = f"{waited_s:.0f} of {took_s:.0f} s"
    elif took_s >= 1:
        share = f"{waited_s:.1f} of {took_s:.1f} s"
    else:
        share = f"{waited_s * 1e3:.3g} of {took_s * 1e3:.3g} ms"
    return f"{each} waited {share} for it"


def add_up_lateness(
    operations: Mapping[int, Sequence[Operation]], matched: Iterable[Match]
) -> dict[int, Lateness]:
    """Return how late each rank began collectives; messages do not count, because one side always
    waits.

    Args:
        operations: rank -> its own, in order.
        matched: which of them are one (`match`).
    """
    totals = {rank: [0, 0, 0, 0] for rank in operations}
    for of_ranks, missing in matched:
        begun = {rank: operations[rank][index] for rank, index in of_ranks.items()}
        if any(one.is_message for one in begun.values()):
            continue
        if missing:
            for rank in missing:
                totals[rank][3] += 1
                totals[rank][1] += sum(one.duration_ns for one in begun.values())
            for rank, one in begun.items():
                totals[rank][2] += one.duration_ns
            continue
        last = max(begun, key=lambda rank: begun[rank].start_ns)
        totals[last][0] += 1
        for rank, one in begun.items():
            waited_ns = one.waited_for_ns(begun[last].start_ns)
            totals[last][1] += waited_ns
            totals[rank][2] += waited_ns
    return {
        rank: Lateness(
            rank, num_last, num_missed, awaited_ns / 1e9, waited_ns / 1e9, len(operations) - 1
        )
        for rank, (num_last, awaited_ns, waited_ns, num_missed) in totals.items()
    }
