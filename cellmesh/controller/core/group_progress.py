"""Operations that the members of each process group have begun on it. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
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
    # Members that will begin no more operations, and the fewest collectives that one has begun.
    missing: Set[int] = frozenset()
    least_of_missing: float = math.inf
    # Members that will begin no more operations: (number of collectives, rank), the lowest first.
    halted: list[tuple[int, int]] = field(default_factory=list)
    # Ranks that wait for the first of these: (number that it has to reach, rank), the lowest first.
    needs_all: list[tuple[int, int]] = field(default_factory=list)
    needs_any: list[int] = field(default_factory=list)  # ranks that wait for any one other member

    def number_of(self, rank: int) -> int:
        count = self.counts.get(rank)
        return count.num_collectives if count is not None else 0

    @cached_property
    def _highest(self) -> list[tuple[int, int]]:
        numbers = ((count.num_collectives, rank) for rank, count in self.counts.items())
        return heapq.nlargest(2, numbers)

    def most_beside(self, rank: int) -> int:
        """Return the largest number of collectives that a member other than this rank has begun."""
        return next((number for number, other in self._highest if other != rank), 0)

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
    counts: Iterable[tuple[int, Iterable[GroupCount]]], num_ranks: int
) -> dict[Key, GroupProgress]:
    """Return the operations that the members of each process group have begun on it.

    Args:
        counts: pairs of a rank and the counts of its groups.
        num_ranks: number of ranks of the mesh.
    """
    groups: dict[Key, GroupProgress] = {}
    everybody = range(num_ranks)
    for rank, own in counts:
        for count in own:
            key = count.name, count.ranks[:1]  # split groups may share a name
            if key not in groups:
                groups[key] = GroupProgress(count, count.ranks or everybody)
            groups[key].counts[rank] = count
    return groups


def progress_of(states: Mapping[int, RankState], num_ranks: int) -> dict[Key, GroupProgress]:
    """Return the operations begun on each process group, from the states of ranks."""
    return read_progress(((rank, state.counts) for rank, state in states.items()), num_ranks)


def find_lacking(states: Mapping[int, RankState]) -> dict[Key, set[int]]:
    """Return the members that are not known to have made a group, for each group that a rank is
    making.
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
