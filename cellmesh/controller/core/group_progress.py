"""Counts the operations that the members of each process group have begun on it, and finds groups
whose members have begun different numbers of them. Pure.

Ranks of a group pair up their collectives by order: a rank that has begun fewer than another has
not reached the rest yet.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...wire.groups import GroupCount
from ...wire.status import RankState

MESSAGES = frozenset({"send", "recv", "recv_anysource"})

Key = tuple[str, tuple[int, ...]]


@dataclass
class GroupProgress:
    """Operations that the members of one process group have begun on it."""

    first: GroupCount
    members: Collection[int]
    counts: dict[int, GroupCount] = field(default_factory=dict)
    mismatch_at: int = 0  # the first awaited collective that members have begun differently
    # Facts for `verdict`: the first collective that can never end, the fewest that a member has
    # begun which does not go on, and the number of members that go on.
    lost_from: float = math.inf
    reached: float = math.inf
    num_free: int = 0

    def number_of(self, rank: int) -> int:
        """Return the number of collectives that a member has begun."""
        count = self.counts.get(rank)
        return count.num_collectives if count is not None else 0

    @cached_property
    def _highest(self) -> list[tuple[int, int]]:
        numbers = ((count.num_collectives, rank) for rank, count in self.counts.items())
        return heapq.nlargest(2, numbers)

    def most_beside(self, rank: int) -> int:
        """Return the largest number of collectives that a member other than this rank has begun."""
        return next((number for number, other in self._highest if other != rank), 0)

    def least_of(self, ranks: Collection[int]) -> float:
        """Return the smallest number of collectives that a member among these ranks has begun."""
        return min(
            (self.number_of(rank) for rank in self.members if rank in ranks), default=math.inf
        )

    @cached_property
    def sent(self) -> dict[tuple[int, int], int]:
        """Number of messages sent, by (sender, receiver)."""
        pairs = ((rank, count.num_sent) for rank, count in self.counts.items())
        return {(rank, peer): number for rank, each in pairs for peer, number in each}

    @cached_property
    def sent_to(self) -> Counter[int]:
        """Number of messages sent to each rank."""
        total: Counter[int] = Counter()
        for (_, peer), number in self.sent.items():
            total[peer] += number
        return total

    @cached_property
    def received(self) -> dict[tuple[int, int], int]:
        """Number of messages received, by (sender, receiver); the sender is -1 for any source."""
        pairs = ((rank, count.num_received) for rank, count in self.counts.items())
        return {(peer, rank): number for rank, each in pairs for peer, number in each}


def read_progress(
    counts: Mapping[int, Iterable[GroupCount]], num_ranks: int
) -> dict[Key, GroupProgress]:
    """Group the ranks' operation counts by process group.

    Args:
        counts: rank -> counts of its groups.
        num_ranks: number of ranks of the mesh.
    """
    groups: dict[Key, GroupProgress] = {}
    everybody = range(num_ranks)
    for rank, own in counts.items():
        for count in own:
            key = count.name, count.ranks[:1]  # split groups may share a name
            if key not in groups:
                groups[key] = GroupProgress(count, count.ranks or everybody)
            groups[key].counts[rank] = count
    return groups


def progress_of(states: Mapping[int, RankState], num_ranks: int) -> dict[Key, GroupProgress]:
    """Group the operation counts in the states of ranks by process group."""
    return read_progress({rank: state.counts for rank, state in states.items()}, num_ranks)


def find_lacking(states: Mapping[int, RankState]) -> dict[Key, set[int]]:
    """Return, for each process group that a rank is making, the members that are not known to have
    made it.
    """
    lacking: dict[Key, set[int]] = {}
    for state in states.values():
        key = state.group, state.making
        if state.making and key not in lacking:
            made = (rank for rank in state.making if rank in states and _has(states[rank], key))
            lacking[key] = set(state.making).difference(made)
    return lacking


def _has(state: RankState, group: Key) -> bool:
    return any((one.name, one.ranks) == group for one in state.counts)


def find_disagreements(
    counts: Mapping[int, Sequence[GroupCount]], num_ranks: int, with_messages: bool
) -> list[tuple[int, ...]]:
    """Return the members of each group whose members have begun different numbers of collectives.

    Args:
        counts: rank -> counts of its groups. A group with a member that is missing is skipped.
        num_ranks: number of ranks of the mesh.
        with_messages: whether to compare also the messages that members have sent with those that
            their peers have received.
    """
    return [
        tuple(group.members)
        for group in read_progress(counts, num_ranks).values()
        if counts.keys() >= set(group.members)
        and (
            len({group.number_of(rank) for rank in group.members}) > 1
            or (with_messages and _messages_differ(group))
        )
    ]


def _messages_differ(group: GroupProgress) -> bool:
    from_anyone = {receiver for sender, receiver in group.received if sender < 0}

    def summed_up(numbers: Mapping[tuple[int, int], int]) -> Counter[tuple[int, int]]:
        """Sum message counts by (sender, receiver), with sender -1 for receives from any source."""
        sums: Counter[tuple[int, int]] = Counter()
        for (sender, receiver), number in numbers.items():
            sums[-1 if receiver in from_anyone else sender, receiver] += number
        return sums

    return summed_up(group.sent) != summed_up(group.received)


def must_be_healed(states: Mapping[int, RankState], num_ranks: int) -> bool:
    """Return whether the groups of idle ranks must be rebuilt: one is broken, or its members have
    begun different numbers of operations, so that their next ones would not match.
    """
    counts = {rank: state.counts for rank, state in states.items()}
    is_broken = any(state.is_broken for state in states.values())
    return is_broken or bool(find_disagreements(counts, num_ranks, with_messages=True))


class Tally:
    """Number of operations that each rank has begun per process group, as last reported between
    runs.

    Attributes:
        is_new: whether a count was added since the last search for disagreements, or that search
            has found some.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, GroupCount]] = {}
        self.is_new = False

    def add(self, ranks: Iterable[int], counts: Sequence[GroupCount]) -> None:
        """Record the operation counts that ranks report after a run that has not failed on them."""
        for rank in ranks:
            self._counts.setdefault(rank, {}).update((count.name, count) for count in counts)
        self.is_new = True

    def replace(self, rank: int, counts: Sequence[GroupCount]) -> None:
        """Replace all recorded operation counts of one rank."""
        self._counts[rank] = {count.name: count for count in counts}

    def forget(self, ranks: Iterable[int]) -> None:
        """Drop the operation counts of ranks that have new process groups or none."""
        for rank in ranks:
            self._counts.pop(rank, None)

    def clear(self) -> None:
        """Drop the operation counts of all ranks, as all ranks are new."""
        self._counts.clear()
        self.is_new = False

    def find_new_disagreements(self, ranks: Iterable[int], num_ranks: int) -> list[tuple[int, ...]]:
        """Return the groups of idle ranks whose members have begun different numbers of
        collectives; return none at once if no count was recorded since the last call that found
        none.
        """
        if not self.is_new:
            return []
        counts = {rank: tuple(self._counts.get(rank, {}).values()) for rank in ranks}
        found = find_disagreements(counts, num_ranks, with_messages=False)
        self.is_new = bool(found)
        return found
