"""The operations that the members of each process group have begun on it. Pure."""

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
    """What the members of one group have begun on it."""

    first: GroupCount
    members: Collection[int]
    counts: dict[int, GroupCount] = field(default_factory=dict)
    mismatch_at: int = 0  # the first awaited collective that members have begun differently
    # Members that will begin nothing more, and the least number of collectives that one has begun.
    missing: Set[int] = frozenset()
    least_of_missing: float = math.inf
    # Of members that will begin nothing more: (number of collectives, rank), the lowest first.
    halted: list[tuple[int, int]] = field(default_factory=list)
    # Who waits for the first halted one: (number that it has to reach, rank), the lowest first.
    needs_all: list[tuple[int, int]] = field(default_factory=list)
    needs_any: list[int] = field(default_factory=list)  # who waits for one of all others

    def number_of(self, rank: int) -> int:
        count = self.counts.get(rank)
        return count.num_collectives if count is not None else 0

    @cached_property
    def _highest(self) -> list[tuple[int, int]]:
        numbers = ((count.num_collectives, rank) for rank, count in self.counts.items())
        return heapq.nlargest(2, numbers)

    def most_beside(self, rank: int) -> int:
        """How many collectives a member has begun that is not `rank`, at the most."""
        return next((number for number, other in self._highest if other != rank), 0)

    @cached_property
    def sent(self) -> dict[tuple[int, int], int]:
        """How many messages were sent, by (sender, receiver)."""
        pairs = ((rank, count.num_sent) for rank, count in self.counts.items())
        return {(rank, peer): number for rank, each in pairs for peer, number in each}

    @cached_property
    def sent_to(self) -> Counter[int]:
        """How many messages were sent to each rank."""
        total: Counter[int] = Counter()
        for (_, peer), number in self.sent.items():
            total[peer] += number
        return total

    @cached_property
    def received(self) -> dict[tuple[int, int], int]:
        """How many messages were received, by (sender or -1, receiver)."""
        pairs = ((rank, count.num_received) for rank, count in self.counts.items())
        return {(peer, rank): number for rank, each in pairs for peer, number in each}


def read_progress(
    counts: Iterable[tuple[int, Iterable[GroupCount]]], num_ranks: int
) -> dict[Key, GroupProgress]:
    """Return the progress of each group.

    Args:
        counts: pairs of a rank and its groups.
        num_ranks: size of the mesh.
    """
    groups: dict[Key, GroupProgress] = {}
    everybody = range(num_ranks)
    for rank, own in counts:
        for count in own:
            key = count.name, count.ranks[:1]  # names are of the whole mesh, but for split groups
            if key not in groups:
                groups[key] = GroupProgress(count, count.ranks or everybody)
            groups[key].counts[rank] = count
    return groups


def progress_of(states: Mapping[int, RankState], num_ranks: int) -> dict[Key, GroupProgress]:
    """Return the progress of each group, by the states of ranks."""
    return read_progress(((rank, state.counts) for rank, state in states.items()), num_ranks)


def find_lacking(states: Mapping[int, RankState]) -> dict[Key, set[int]]:
    """Return, of each group that a rank is making, the members that have not made it, or of which
    nothing is known.
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
