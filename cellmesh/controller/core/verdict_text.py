"""Texts for users on operations that cannot match, and on ranks that wait for others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ...wire.groups import InFlight, label_of
from ...wire.ranks import describe_ranks, group_ranks, with_verb
from ...wire.status import RankState
from .group_progress import MESSAGES, GroupProgress, Key, progress_of

# Parts of a sentence beyond this number are counted, not listed.
_MAX_PARTS = 4


class Waits(msgspec.Struct, frozen=True):
    """Ranks that wait for operations of others.

    Attributes:
        groups: all groups, with the operations that their members have begun.
        states: rank -> where it waits, for the ranks to describe, in ascending order.
        never: ranks that will begin no more operations.
        dead: ranks that are dead.
    """

    groups: Mapping[Key, GroupProgress]
    states: Mapping[int, RankState]
    never: Collection[int]
    dead: Collection[int]


def describe_waits(
    states: Mapping[int, RankState], idle: Collection[int], dead: Collection[int], num_ranks: int
) -> list[str]:
    """Return a clause for each group of waiting ranks, with the ranks that they wait for, even if
    those may still join.

    Args:
        states: state of each rank that answered, with the counts of all its groups.
        idle: ranks that execute no run.
        dead: ranks that are dead.
        num_ranks: number of ranks of the mesh.
    """
    waiting = {rank: state for rank, state in sorted(states.items()) if state.collective}
    return _describe_waits(Waits(progress_of(states, num_ranks), waiting, idle, dead))


def _label(group: GroupProgress) -> str:
    return label_of(group.first.description, group.first.ranks)


def describe_verdict(waits: Waits) -> list[str]:
    """Return clauses on collectives that ranks have begun differently or, without such ones, on
    ranks that wait for others.
    """
    concerned = {
        (one.group, rank)
        for rank, state in waits.states.items()
        for one in state.in_flight
        if one.peer < 0
    }
    parts = []
    for group in waits.groups.values():
        number = group.mismatch_at
        if number and any((group.first.name, rank) in concerned for rank in group.counts):
            each = ((rank, begun) for rank, count in group.counts.items() for begun in count.recent)
            kinds = {rank: one.describe() for rank, one in each if one.number == number}
            alike = group_ranks(dict(sorted(kinds.items())))
            found = _cut([f"{kind} on {describe_ranks(ranks)}" for kind, ranks in alike.items()])
            place = f"on {_label(group)} the {ordinal(number)} operation"
            parts.append(f"{place} is {' and '.join(found)}")
    return _cut(parts) if parts else _describe_waits(waits)


def _cut(parts: Sequence[str], num: int | None = None) -> list[str]:
    left = (len(parts) if num is None else num) - _MAX_PARTS
    return [*parts[:_MAX_PARTS], *([f"{left} more"] if left > 0 else [])]


def _describe_waits(waits: Waits) -> list[str]:
    by_wait: dict[tuple[Key, InFlight], list[int]] = {}
    apart: list[int] = []
    of_rank = {
        (rank, count.name): key
        for key, group in waits.groups.items()
        for rank, count in group.counts.items()
        if rank in waits.states
    }
    for rank, state in waits.states.items():
        own = [one for one in state.in_flight if (rank, one.group) in of_rank]
        if not own:  # also if it waits for ranks of another mesh
            apart.append(rank)
        for one in own:
            by_wait.setdefault((of_rank[rank, one.group], one), []).append(rank)
    parts = []
    for (key, one), ranks in list(by_wait.items())[:_MAX_PARTS]:
        group = waits.groups[key]
        if one.name in MESSAGES:
            place = _message(one)
        else:
            missing = [rank for rank in group.members if group.number_of(rank) < one.number]
            place = f"in the {ordinal(one.number)} operation on {_label(group)} ({one.name}), "
            place += _missing(missing, waits)
        parts.append(f"{with_verb(ranks, 'waits', 'wait')} {place}")
    by_name = group_ranks({rank: waits.states[rank].collective for rank in apart})
    parts += [f"{with_verb(ranks, 'waits', 'wait')} in {name}" for name, ranks in by_name.items()]
    return _cut(parts, len(by_wait) + len(by_name))


def _missing(missing: Sequence[int], waits: Waits) -> str:
    kinds = {
        rank: "died without"
        if rank in waits.dead
        else "ended without"
        if rank in waits.never
        else "not begun"
        for rank in missing
    }
    parts = [f"{with_verb(rs, 'has', 'have')} {kind}" for kind, rs in group_ranks(kinds).items()]
    return f"which {' and '.join(parts)}" if parts else "which all have begun"


def _message(one: InFlight) -> str:
    if one.peer < 0:
        return "to receive from any rank, and none has sent"
    if one.name == "send":
        return f"to send to rank {one.peer}, which does not receive"
    return f"to receive from rank {one.peer}, which has not sent"


def ordinal(number: int) -> str:
    """Return a number as an ordinal, e.g. ``12th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"
