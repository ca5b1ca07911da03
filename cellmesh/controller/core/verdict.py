"""Finds deadlocks: ranks that wait for operations of other ranks that can never match theirs. Pure;
`verdict_text` describes them to users.

Two facts prove a deadlock: ranks have begun collectives of different kinds, sizes or dtypes under
one number of a group; or ranks wait in a circle, each for an operation that another would begin
only after its own. An uncertain wait does not count: once the root of a broadcast has begun, for
example, its data may be on their way.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...wire.groups import Begun, InFlight
from ...wire.status import RankState
from .group_progress import MESSAGES, GroupProgress, Key, find_lacking, progress_of
from .verdict_text import Waits, describe_verdict

# Collectives that some ranks may end before others have begun them.
_FROM_ROOT, _TO_ROOT = frozenset({"broadcast", "scatter"}), frozenset({"reduce", "gather"})


@dataclass(frozen=True)
class Verdict:
    """Ranks that are in a deadlock.

    Attributes:
        stuck: the ranks, in ascending order.
        text: the reason, in a sentence for users.
    """

    stuck: tuple[int, ...]
    text: str


def find_verdict(
    states: Mapping[int, RankState],
    absent: Collection[int],
    num_ranks: int,
    patience_s: float,
    dead: Collection[int] = (),
) -> Verdict | None:
    """Return the ranks that wait for operations that will never be begun, and why; None if there
    are none. Takes time linear in the number of ranks and their groups.

    Args:
        states: state of each rank that answered, with the counts of all its groups.
        absent: ranks that will begin no more operations.
        num_ranks: number of ranks of the mesh.
        patience_s: how long a rank must have waited to count as stuck, in seconds.
        dead: dead ranks, which count as absent.
    """
    groups, lacking = progress_of(states, num_ranks), find_lacking(states)
    blocked = {
        rank: state
        for rank, state in sorted(states.items())
        if state.collective and state.waited_s >= patience_s and rank not in absent
        # If all others have made the group that it is making, it will go on.
        if not state.making or lacking[state.group, state.making] != {rank}
    }
    never = (set(absent) | set(dead)) - blocked.keys()
    _find_mismatches(groups, blocked)
    search = _Search(groups, blocked, never, num_ranks)
    stuck = search.find()
    if not stuck:
        return None
    waits = Waits(groups, blocked, sorted(stuck), frozenset(never), frozenset(dead))
    text = "; ".join(describe_verdict(waits))
    return Verdict(tuple(sorted(stuck)), f"these cannot meet: {text}")


def _find_mismatches(groups: Mapping[Key, GroupProgress], blocked: Mapping[int, RankState]) -> None:
    """Set `mismatch_at` of each group: the number of the first collective that a rank waits in and
    that members have begun differently.
    """
    awaited: dict[str, set[int]] = defaultdict(set)
    for state in blocked.values():
        for one in state.in_flight:
            if one.name not in MESSAGES:
                awaited[one.group].add(one.number)
    for group in groups.values():
        numbers = awaited.get(group.first.name, set())
        seen: dict[int, Begun] = {}
        differ: set[int] = set()
        for count in group.counts.values() if numbers else ():
            for begun in count.recent:
                if begun.number in numbers and seen.setdefault(begun.number, begun) != begun:
                    differ.add(begun.number)
        group.mismatch_at = min(differ, default=0)


class _Search:
    """Search for the largest set of blocked ranks in which each waits for others of the set, or for
    absent ranks.

    All blocked ranks count as stuck at first. Then each rank that may go on is taken out, and each
    that has waited only for such ranks.
    """

    def __init__(
        self,
        groups: Mapping[Key, GroupProgress],
        blocked: Mapping[int, RankState],
        never: Collection[int],
        num_ranks: int,
    ) -> None:
        self._groups = groups
        self._by_name: dict[int, dict[str, GroupProgress]] = defaultdict(dict)
        for group in groups.values():
            for rank, count in group.counts.items():
                self._by_name[rank][count.name] = group
        self._num_ranks = num_ranks
        self._never = set(never)
        # A rank that makes a group, or waits for a store, is in no operation.
        self._apart = {rank for rank, state in blocked.items() if not state.in_flight}
        self._blocked = blocked
        self._stuck = set(blocked)
        self._free: deque[int] = deque()
        self._on_rank: dict[int, list[int]] = defaultdict(list)  # rank -> ranks that wait for it

    def find(self) -> set[int]:
        halted = self._stuck | self._never
        for group in self._groups.values():
            group.halted = [
                (group.number_of(rank), rank) for rank in group.members if rank in halted
            ]
            heapq.heapify(group.halted)
        for rank in self._blocked:
            if rank not in self._apart and not self._enter(rank):
                self._release(rank)
        for group in self._groups.values():
            heapq.heapify(group.needs_all)
            if len(group.halted) < len(group.members):
                self._free_any(group)
            self._settle(group)
        if self._stuck == self._apart or self._runs_elsewhere():
            self._free_apart()
        while self._free:
            rank = self._free.popleft()
            for waiting in self._on_rank.pop(rank, ()):
                self._release(waiting)
            for group in self._by_name[rank].values():
                self._free_any(group)
                self._settle(group)
            if rank not in self._apart:
                self._free_apart()
        return self._stuck if self._stuck - self._apart else set()

    def _runs_elsewhere(self) -> bool:
        return len(self._stuck | self._never) < self._num_ranks

    def _free_apart(self) -> None:
        for rank in self._apart & self._stuck:
            self._release(rank)

    def _enter(self, rank: int) -> bool:
        """Record the ranks that a rank waits for; return False if one of its operations can
        complete already.
        """
        for one in self._blocked[rank].in_flight:
            group = self._by_name[rank].get(one.group)
            if group is None or one.gives_up:
                return False
            if one.name in MESSAGES:
                if not self._enter_message(rank, group, one):
                    return False
            elif group.mismatch_at and one.number >= group.mismatch_at:
                continue  # nothing ends it
            elif not self._enter_collective(rank, group, one):
                return False
        return True

    def _enter_message(self, rank: int, group: GroupProgress, one: InFlight) -> bool:
        if one.name == "recv_anysource":
            group.needs_any.append(rank)
            received = sum(number for _, number in group.counts[rank].num_received)
            return received > group.sent_to[rank]
        peer = one.peer
        if one.name == "send":  # the peer may receive it in a receive from any source
            begun = group.received.get((rank, peer), 0) + group.received.get((-1, peer), 0)
        else:
            begun = group.sent.get((peer, rank), 0)
        if begun >= one.number or not self._is_halted(peer):
            return False
        self._on_rank[peer].append(rank)
        return True

    def _enter_collective(self, rank: int, group: GroupProgress, one: InFlight) -> bool:
        root = _root_of(group, rank, one.number)
        if one.name in _FROM_ROOT and root not in (rank, -1):
            if group.number_of(root) >= one.number or not self._is_halted(root):
                return False
            self._on_rank[root].append(rank)
            return True
        if one.name in _FROM_ROOT or (one.name in _TO_ROOT and root != rank):
            group.needs_any.append(rank)
            return group.most_beside(rank) < one.number
        heapq.heappush(group.needs_all, (one.number, rank))
        return True

    def _is_halted(self, rank: int) -> bool:
        return rank in self._stuck or rank in self._never

    def _release(self, rank: int) -> None:
        if rank in self._stuck:
            self._stuck.discard(rank)
            self._free.append(rank)

    def _free_any(self, group: GroupProgress) -> None:
        waiting, group.needs_any = group.needs_any, []
        for rank in waiting:
            self._release(rank)

    def _settle(self, group: GroupProgress) -> None:
        """Release ranks whose collective may be joined by all members that have not begun it."""
        while group.halted and not self._is_halted(group.halted[0][1]):
            heapq.heappop(group.halted)
        lowest = group.halted[0][0] if group.halted else None
        while group.needs_all and (lowest is None or group.needs_all[0][0] <= lowest):
            self._release(heapq.heappop(group.needs_all)[1])


def _root_of(group: GroupProgress, rank: int, number: int) -> int:
    recent = group.counts[rank].recent
    return next((begun.root for begun in recent if begun.number == number), -1)
