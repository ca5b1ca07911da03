"""Says which operations of ranks cannot meet, and which ranks wait for which others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...wire.groups import Begun, InFlight, label_of
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.status import RankState
from .group_progress import MESSAGES, GroupProgress, Key, read_progress

# Names more than these are counted in a sentence.
_MAX_PARTS = 4


@dataclass(frozen=True)
class Waits:
    """Ranks that wait for operations of others.

    Attributes:
        groups: all groups, and what their members have begun.
        states: rank -> where it waits.
        ranks: those that are described, ascending.
        never: ranks that will begin nothing more.
        dead: ranks that are dead.
    """

    groups: Mapping[Key, GroupProgress]
    states: Mapping[int, RankState]
    ranks: Sequence[int]
    never: frozenset[int]
    dead: frozenset[int]


def describe_waits(
    states: Mapping[int, RankState], idle: Collection[int], dead: Collection[int], num_ranks: int
) -> tuple[list[str], set[int]]:
    """Say which ranks wait for which others, whether or not these may still come.

    Args:
        states: what ranks do, as far as they answered; with all their groups' counts.
        idle: ranks that run nothing.
        dead: ranks that are dead.
        num_ranks: size of the mesh.

    Returns:
        A clause for each wait, and the ranks that are waited for and live.
    """
    groups = read_progress(states, num_ranks)
    waiting = {rank: state for rank, state in sorted(states.items()) if state.collective}
    names = {one.group for state in waiting.values() for one in state.in_flight}
    numbers: dict[str, int] = {}
    peers = set()
    for state in waiting.values():
        for one in state.in_flight:
            if one.name in MESSAGES:
                peers.add(one.peer)
            else:
                numbers[one.group] = max(numbers.get(one.group, 0), one.number)
    missing = {
        rank
        for group in groups.values()
        if group.first.name in names
        for rank in group.members
        if group.number_of(rank) < numbers.get(group.first.name, 0)
    }
    parts = _describe_waits(Waits(groups, waiting, list(waiting), frozenset(idle), frozenset(dead)))
    return parts, (missing | peers) - waiting.keys() - set(dead) - {-1}


def describe_mismatch(by_rank: Mapping[int, Begun], place: str, number: int) -> str:
    """Say how ranks have begun one collective differently.

    Args:
        by_rank: rank -> what it has begun.
        place: the group, as ``on dp``.
        number: of the operation.
    """
    names = {begun.name for begun in by_rank.values()}
    if len(names) > 1:
        kinds = group_ranks({rank: begun.name for rank, begun in sorted(by_rank.items())})
        parts = [f"{name} on {describe_ranks(ranks)}" for name, ranks in kinds.items()]
        return f"{place} the {ordinal(number)} operation is {_join(parts)}"
    what = f"{place} the {ordinal(number)} operation, {next(iter(names))},"
    dtypes = {begun.dtype for begun in by_rank.values()}
    sizes = {begun.num_elements for begun in by_rank.values()}
    if len(dtypes) > 1 or len(sizes) > 1:
        kinds = group_ranks({rank: _amount(begun) for rank, begun in sorted(by_rank.items())})
        parts = [f"{amount} on {describe_ranks(ranks)}" for amount, ranks in kinds.items()]
        return f"{what} has {_join(parts)}"
    roots = group_ranks({rank: str(begun.root) for rank, begun in sorted(by_rank.items())})
    parts = [f"rank {root} on {describe_ranks(ranks)}" for root, ranks in roots.items()]
    return f"{what} has as its root {_join(parts)}"


def _label(group: GroupProgress) -> str:
    return label_of(group.first.description, group.first.ranks)


def describe_begun(begun: Begun) -> str:
    """Return a collective's kind and size, as ``all_reduce of 8 float32``."""
    return f"{begun.name} of {_amount(begun)}"


def _amount(begun: Begun) -> str:
    if begun.num_elements < 0:
        return begun.dtype or "no tensor"
    return f"{begun.num_elements:,} {begun.dtype}"


def describe_verdict(waits: Waits) -> list[str]:
    """Say what ranks have begun differently, or else which ranks wait for which others."""
    concerned = {
        (one.group, rank)
        for rank in waits.ranks
        for one in waits.states[rank].in_flight
        if one.peer < 0
    }
    parts = []
    for group in waits.groups.values():
        if not group.mismatch_at:
            continue
        if not any((group.first.name, rank) in concerned for rank in group.counts):
            continue
        by_rank = {
            rank: begun
            for rank, count in group.counts.items()
            for begun in count.recent
            if begun.number == group.mismatch_at
        }
        parts.append(
            describe_mismatch(
                by_rank,
                f"on {_label(group)}",
                group.mismatch_at,
            )
        )
    if parts:
        return _cut(parts)
    return _describe_waits(waits)


def _cut(parts: Sequence[str], num: int | None = None) -> list[str]:
    left = (len(parts) if num is None else num) - _MAX_PARTS
    return [*parts[:_MAX_PARTS], *([f"and {left} more such waits"] if left > 0 else [])]


def _describe_waits(waits: Waits) -> list[str]:
    by_wait: dict[tuple[Key, InFlight], list[int]] = {}
    apart: list[int] = []
    of_rank = {
        (rank, count.name): key
        for key, group in waits.groups.items()
        for rank, count in group.counts.items()
        if rank in waits.states
    }
    for rank in waits.ranks:
        if not waits.states[rank].in_flight:
            apart.append(rank)
        for one in waits.states[rank].in_flight:
            by_wait.setdefault((of_rank[rank, one.group], one), []).append(rank)
    parts = []
    for (key, one), ranks in list(by_wait.items())[:_MAX_PARTS]:
        group = waits.groups[key]
        wait = "waits" if len(ranks) == 1 else "wait"
        if one.name in MESSAGES:
            parts.append(f"{describe_ranks(ranks)} {wait} {_message(one)}")
            continue
        missing = [rank for rank in group.members if group.number_of(rank) < one.number]
        parts.append(
            f"{describe_ranks(ranks)} {wait} in the {ordinal(one.number)} operation on "
            f"{_label(group)} ({one.name}), {_missing(missing, group, waits)}"
        )
    by_name = group_ranks({rank: waits.states[rank].collective for rank in apart})
    parts += [
        f"{describe_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {name}"
        for name, ranks in by_name.items()
    ]
    return _cut(parts, len(by_wait) + len(by_name))


def _missing(missing: Sequence[int], group: GroupProgress, waits: Waits) -> str:
    gone = [rank for rank in missing if rank in waits.dead]
    if not missing:
        return "which all have begun"
    ended = [rank for rank in missing if rank in waits.never and rank not in waits.dead]
    left = [rank for rank in missing if rank not in waits.never and rank not in waits.dead]
    parts = []
    if left:
        parts.append(f"which {describe_ranks(left)} {_have(left)} not begun")
    if ended:
        numbers = group_ranks({rank: group.number_of(rank) for rank in ended})
        parts += [
            f"and {describe_ranks(ranks)} {_have(ranks)} ended after {number or 'none'}"
            for number, ranks in numbers.items()
        ]
    if gone:
        parts.append(f"and {describe_ranks(gone)} {'is' if len(gone) == 1 else 'are'} dead")
    return ", ".join(parts[:_MAX_PARTS])


def _message(one: InFlight) -> str:
    if one.peer < 0:
        return "to receive from any rank, and none has sent"
    if one.name == "send":
        return f"to send to rank {one.peer}, which does not receive"
    return f"to receive from rank {one.peer}, which has not sent"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _join(parts: Sequence[str]) -> str:
    if len(parts) > _MAX_PARTS:
        parts = [*parts[:_MAX_PARTS], f"{len(parts) - _MAX_PARTS} others"]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def ordinal(number: int) -> str:
    """Return a number as in ``12th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"
