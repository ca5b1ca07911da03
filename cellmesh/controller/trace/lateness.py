"""Which rank begins collectives late, and how long others wait for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...wire.trace import Collective

_MESSAGES = frozenset({"send", "recv"})
# A collective on several ranks: rank -> index in that rank's, and the members that have not begun
# it.
Match = tuple[dict[int, int], set[int]]


@dataclass(frozen=True)
class Lateness:
    """How late a rank began the collectives that it shares with others.

    Attributes:
        rank: which.
        num_last: to how many it came last.
        num_missed: to how many it never came, although others of the group did.
        awaited_s: how long the ranks that had come before waited for it in these, added up.
        waited_s: how long it waited for others.
    """

    rank: int
    num_last: int
    num_missed: int
    awaited_s: float
    waited_s: float


def find_straggler(lateness: Mapping[int, Lateness], took_s: float) -> int | None:
    """Return the rank that others waited for noticeably; None if there is none.

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
    """Describe the straggler; "" if no rank waited for another. See `find_straggler`."""
    num = sum(one.num_last for one in lateness.values())
    straggler = find_straggler(lateness, took_s)
    if straggler is None:
        return (
            f"no straggler: ranks came to {num} collectives at about the same time" if num else ""
        )
    worst = lateness[straggler]
    if worst.num_missed:
        what = "collective" if worst.num_missed == 1 else "collectives"
        return f"rank {worst.rank} never came to {worst.num_missed} {what} that others waited in"
    s = worst.awaited_s
    waited = f"{s:.1f} s" if s >= 1 else f"{s * 1e3:.3g} ms"
    return (
        f"rank {worst.rank} came last to {worst.num_last} of {num} collectives; the others waited "
        f"for it {waited}, added up"
    )


class Timed(Protocol):
    """An operation with a begin and a length."""

    @property
    def start_ns(self) -> int: ...

    @property
    def duration_ns(self) -> int: ...


def find_lateness(collectives: Mapping[int, Sequence[Collective]]) -> dict[int, Lateness]:
    """Find out which rank began collectives last, and how long others waited for it.

    Args:
        collectives: rank -> its collectives, in order.
    """
    return add_up_lateness(collectives, match_collectives(collectives))


def add_up_lateness(
    collectives: Mapping[int, Sequence[Timed]], matched: Iterable[Match]
) -> dict[int, Lateness]:
    """As `find_lateness`, for collectives that are matched already."""
    totals = {rank: [0, 0, 0, 0] for rank in collectives}
    for of_ranks, missing in matched:
        if missing:
            waited_ns = sum(
                collectives[rank][index].duration_ns for rank, index in of_ranks.items()
            )
            for rank in missing:
                totals[rank][3] += 1
                totals[rank][1] += waited_ns
            for rank, index in of_ranks.items():
                totals[rank][2] += collectives[rank][index].duration_ns
            continue
        last = max(of_ranks, key=lambda rank: collectives[rank][of_ranks[rank]].start_ns)
        last_ns = collectives[last][of_ranks[last]].start_ns
        totals[last][0] += 1
        for rank, index in of_ranks.items():
            waited_ns = _waited_ns(collectives[rank][index], last_ns)
            totals[last][1] += waited_ns
            totals[rank][2] += waited_ns
    return {
        rank: Lateness(rank, num_last, num_missed, awaited_ns / 1e9, waited_ns / 1e9)
        for rank, (num_last, awaited_ns, waited_ns, num_missed) in totals.items()
    }


def find_waits(collectives: Mapping[int, Sequence[Collective]]) -> dict[int, list[int]]:
    """Return how long each collective waited for the last of its ranks, in nanoseconds.

    Args:
        collectives: rank -> its collectives, in order.

    Returns:
        rank -> a number for each of its collectives; 0 for those without a counterpart on others.
    """
    return add_up_waits(collectives, match_collectives(collectives))


def add_up_waits(
    collectives: Mapping[int, Sequence[Timed]], matched: Iterable[Match]
) -> dict[int, list[int]]:
    """As `find_waits`, for collectives that are matched already."""
    waits = {rank: [0] * len(of_rank) for rank, of_rank in collectives.items()}
    for of_ranks, missing in matched:
        if missing:
            for rank, index in of_ranks.items():
                waits[rank][index] = collectives[rank][index].duration_ns
            continue
        last_ns = max(collectives[rank][index].start_ns for rank, index in of_ranks.items())
        for rank, index in of_ranks.items():
            waits[rank][index] = _waited_ns(collectives[rank][index], last_ns)
    return waits


def _waited_ns(one: Timed, last_ns: int) -> int:
    return max(0, min(last_ns, one.start_ns + one.duration_ns) - one.start_ns)


def match_collectives(
    collectives: Mapping[int, Sequence[Collective]],
) -> list[Match]:
    """Match the collectives of ranks: the n-th of a name on a process group is one collective on
    all members.

    Messages are left out. Members that never came to one are named where its group is known.

    Args:
        collectives: rank -> its collectives, in order.

    Returns:
        For each of them, rank -> index in that rank's, and the members that have not begun it.
    """
    begun: dict[tuple[str, tuple[int, ...], str, int], dict[int, int]] = {}
    for rank, of_rank in collectives.items():
        counts: dict[tuple[str, tuple[int, ...], str], int] = {}
        for index, one in enumerate(of_rank):
            kind = (one.name, one.ranks, one.group)
            counts[kind] = counts.get(kind, 0) + 1
            if one.name not in _MESSAGES:
                begun.setdefault((*kind, counts[kind]), {})[rank] = index
    matched = []
    for (_, members, group, _), of_ranks in begun.items():
        expected = set(members or collectives) & set(collectives)
        missing = expected - set(of_ranks)
        if len(expected) > 1 and (not missing or group):
            matched.append((of_ranks, missing))
    return matched
