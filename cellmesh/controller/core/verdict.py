"""Finds operations of ranks that can never meet, and says so in a sentence. Pure.

Two facts prove that: ranks have begun collectives of different kinds, sizes or dtypes under one
number of a group; or ranks wait in a circle, each for an operation that another would begin only
after its own. What is uncertain counts as possible: of a broadcast whose root has begun, data may
still be on their way.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...wire.groups import Begun, GroupCount, InFlight
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.status import RankState

# Names more than these are counted in a sentence.
_MAX_PARTS = 4
# Of these, some ranks may end before others have begun.
_FROM_ROOT, _TO_ROOT = frozenset({"broadcast", "scatter"}), frozenset({"reduce", "gather"})
_MESSAGES = frozenset({"send", "recv", "recv_anysource"})
_CUSTOM = frozenset({"", "undefined"})

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Verdict:
    """Ranks that wait for what can never happen.

    Attributes:
        stuck: those ranks, ascending.
        text: why, in a sentence.
    """

    stuck: tuple[int, ...]
    text: str


@dataclass
class _Group:
    """What the members of one group have begun on it."""

    first: GroupCount
    members: Collection[int]
    counts: dict[int, GroupCount] = field(default_factory=dict)
    mismatch_at: int = (
        0  # the first collective that is waited for and that members begun differently
    )
    # Of members that will begin nothing more: (number of collectives, rank), the lowest first.
    halted: list[tuple[int, int]] = field(default_factory=list)
    # Who waits for the first halted one: (number that it has to reach, rank), the lowest first.
    needs_all: list[tuple[int, int]] = field(default_factory=list)
    needs_any: list[int] = field(default_factory=list)  # who waits for one of all others

    def number_of(self, rank: int) -> int:
        count = self.counts.get(rank)
        return count.num_collectives if count is not None else 0

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


def find_verdict(
    states: Mapping[int, RankState],
    absent: Collection[int],
    num_ranks: int,
    patience_s: float,
    dead: Collection[int] = (),
) -> Verdict | None:
    """Return the ranks that wait for operations that will never be begun, and why; None if there
    are none. Takes time in proportion to the ranks and their groups.

    Args:
        states: what ranks do, as far as they answered; with all their groups' counts.
        absent: ranks that will begin nothing more.
        num_ranks: size of the mesh.
        patience_s: how long a rank must have waited to count.
        dead: ranks that are dead; absent, too.
    """
    groups = _read_groups(states, num_ranks)
    blocked = {
        rank: state
        for rank, state in sorted(states.items())
        if state.collective and state.waited_s >= patience_s and rank not in absent
    }
    never = (set(absent) | set(dead)) - blocked.keys()
    _find_mismatches(groups, blocked)
    search = _Search(groups, blocked, never, num_ranks)
    stuck = search.find()
    if not stuck:
        return None
    text = "; ".join(_describe(groups, blocked, stuck, never, dead))
    return Verdict(tuple(sorted(stuck)), f"these cannot meet: {text}")


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
    groups = _read_groups(states, num_ranks)
    waiting = {rank: state for rank, state in sorted(states.items()) if state.collective}
    names = {one.group for state in waiting.values() for one in state.in_flight}
    numbers: dict[str, int] = {}
    peers = set()
    for state in waiting.values():
        for one in state.in_flight:
            if one.name in _MESSAGES:
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
    parts = _describe_waits(groups, waiting, waiting.keys(), idle, dead)
    return parts, (missing | peers) - waiting.keys() - set(dead) - {-1}


def _read_groups(states: Mapping[int, RankState], num_ranks: int) -> dict[Key, _Group]:
    groups: dict[Key, _Group] = {}
    everybody = range(num_ranks)
    for rank, state in states.items():
        for count in state.counts:
            key = _key(count)
            if key not in groups:
                groups[key] = _Group(count, count.ranks or everybody)
            groups[key].counts[rank] = count
    return groups


def _key(count: GroupCount) -> Key:
    return count.name, count.ranks[:1]  # names are those of the whole mesh, but for split groups


def _find_mismatches(groups: Mapping[Key, _Group], blocked: Mapping[int, RankState]) -> None:
    """Note, of each group, the first collective that is waited for and was begun differently."""
    awaited: dict[str, set[int]] = defaultdict(set)
    for state in blocked.values():
        for one in state.in_flight:
            if one.name not in _MESSAGES:
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


def describe_mismatch(
    by_rank: Mapping[int, Begun], place: str, number: int, singular: str = "operation"
) -> str:
    """Say how ranks have begun one collective differently.

    Args:
        by_rank: rank -> what it has begun.
        place: the group, as ``on dp``.
        number: of the operation.
        singular: what to call it if its kind differs.
    """
    names = {begun.name for begun in by_rank.values()}
    if len(names) > 1:
        kinds = group_ranks({rank: begun.name for rank, begun in sorted(by_rank.items())})
        parts = [f"{name} on {describe_ranks(ranks)}" for name, ranks in kinds.items()]
        return f"{place} the {ordinal(number)} {singular} is {_join(parts)}"
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


def _amount(begun: Begun) -> str:
    if begun.num_elements < 0:
        return begun.dtype or "no tensor"
    return f"{begun.num_elements:,} {begun.dtype}"


class _Search:
    """Finds the largest set of blocked ranks in which each waits for others of the set, or for
    absent ones.

    All blocked ranks count as stuck first. Each rank that may go on is taken out, and so is each
    that waited only for such ranks.
    """

    def __init__(
        self,
        groups: Mapping[Key, _Group],
        blocked: Mapping[int, RankState],
        never: Collection[int],
        num_ranks: int,
    ) -> None:
        self._groups = groups
        self._by_name: dict[int, dict[str, _Group]] = defaultdict(dict)
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
        self._on_rank: dict[int, list[int]] = defaultdict(list)  # who waits for that rank

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
        """Note for whom a rank waits; return False if one of its operations may end as it is."""
        for one in self._blocked[rank].in_flight:
            group = self._by_name[rank].get(one.group)
            if group is None:
                return False
            if one.name in _MESSAGES:
                if not self._enter_message(rank, group, one):
                    return False
            elif group.mismatch_at and one.number >= group.mismatch_at:
                continue  # nothing ends it
            elif not self._enter_collective(rank, group, one):
                return False
        return True

    def _enter_message(self, rank: int, group: _Group, one: InFlight) -> bool:
        if one.name == "recv_anysource":
            group.needs_any.append(rank)
            received = sum(number for _, number in group.counts[rank].num_received)
            return received > group.sent_to[rank]
        peer = one.peer
        if one.name == "send":  # what they receive from anyone may be this one
            begun = group.received.get((rank, peer), 0) + group.received.get((-1, peer), 0)
        else:
            begun = group.sent.get((peer, rank), 0)
        if begun >= one.number or not self._is_halted(peer):
            return False
        self._on_rank[peer].append(rank)
        return True

    def _enter_collective(self, rank: int, group: _Group, one: InFlight) -> bool:
        root = _root_of(group, rank, one.number)
        if one.name in _FROM_ROOT and root not in (rank, -1):
            if group.number_of(root) >= one.number or not self._is_halted(root):
                return False
            self._on_rank[root].append(rank)
            return True
        if one.name in _FROM_ROOT or (one.name in _TO_ROOT and root != rank):
            group.needs_any.append(rank)
            return all(
                group.number_of(other) < one.number for other in group.members if other != rank
            )
        heapq.heappush(group.needs_all, (one.number, rank))
        return True

    def _is_halted(self, rank: int) -> bool:
        return rank in self._stuck or rank in self._never

    def _release(self, rank: int) -> None:
        if rank in self._stuck:
            self._stuck.discard(rank)
            self._free.append(rank)

    def _free_any(self, group: _Group) -> None:
        waiting, group.needs_any = group.needs_any, []
        for rank in waiting:
            self._release(rank)

    def _settle(self, group: _Group) -> None:
        """Release ranks whose collective on a group may be joined by all that have not begun it."""
        while group.halted and not self._is_halted(group.halted[0][1]):
            heapq.heappop(group.halted)
        lowest = group.halted[0][0] if group.halted else None
        while group.needs_all and (lowest is None or group.needs_all[0][0] <= lowest):
            self._release(heapq.heappop(group.needs_all)[1])


def _root_of(group: _Group, rank: int, number: int) -> int:
    recent = group.counts[rank].recent
    return next((begun.root for begun in recent if begun.number == number), -1)


# ---- in words


def _describe(
    groups: Mapping[Key, _Group],
    blocked: Mapping[int, RankState],
    stuck: Collection[int],
    never: Collection[int],
    dead: Collection[int],
) -> list[str]:
    concerned = {
        (one.group, rank) for rank in stuck for one in blocked[rank].in_flight if one.peer < 0
    }
    parts = []
    for group in groups.values():
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
        parts.append(describe_mismatch(by_rank, f"on {name_of(group.first)}", group.mismatch_at))
    if parts:
        return _cut(parts)
    return _describe_waits(groups, blocked, stuck, never, dead)


def _cut(parts: Sequence[str], num: int | None = None) -> list[str]:
    left = (len(parts) if num is None else num) - _MAX_PARTS
    return [*parts[:_MAX_PARTS], *([f"and {left} more such waits"] if left > 0 else [])]


def _describe_waits(
    groups: Mapping[Key, _Group],
    blocked: Mapping[int, RankState],
    stuck: Collection[int],
    never: Collection[int],
    dead: Collection[int],
) -> list[str]:
    by_wait: dict[tuple[Key, InFlight], list[int]] = {}
    apart: list[int] = []
    of_rank = {
        (rank, count.name): key
        for key, group in groups.items()
        for rank, count in group.counts.items()
        if rank in stuck
    }
    for rank in sorted(stuck):
        if not blocked[rank].in_flight:
            apart.append(rank)
        for one in blocked[rank].in_flight:
            by_wait.setdefault((of_rank[rank, one.group], one), []).append(rank)
    parts = []
    for (key, one), ranks in list(by_wait.items())[:_MAX_PARTS]:
        group = groups[key]
        wait = "waits" if len(ranks) == 1 else "wait"
        if one.name in _MESSAGES:
            parts.append(f"{describe_ranks(ranks)} {wait} {_message(one)}")
            continue
        missing = [rank for rank in group.members if group.number_of(rank) < one.number]
        parts.append(
            f"{describe_ranks(ranks)} {wait} in the {ordinal(one.number)} operation on "
            f"{name_of(group.first)} ({one.name}), {_missing(missing, group, never, dead)}"
        )
    by_name = group_ranks({rank: blocked[rank].collective for rank in apart})
    parts += [
        f"{describe_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {name}"
        for name, ranks in by_name.items()
    ]
    return _cut(parts, len(by_wait) + len(by_name))


def _missing(
    missing: Sequence[int], group: _Group, never: Collection[int], dead: Collection[int]
) -> str:
    gone = [rank for rank in missing if rank in dead]
    if not missing:
        return "which all have begun"
    ended = [rank for rank in missing if rank in never and rank not in gone]
    left = [rank for rank in missing if rank not in never and rank not in gone]
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


def name_of(count: GroupCount) -> str:
    """Return what users call a process group: a mesh dim, the default group, or its ranks."""
    description = count.description
    if description == "default_pg":
        return "the default group"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    if description not in _CUSTOM:
        return description
    return f"the group of {describe_ranks(count.ranks)}" if count.ranks else "the default group"


def ordinal(number: int) -> str:
    """Return a number as in ``12th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"
