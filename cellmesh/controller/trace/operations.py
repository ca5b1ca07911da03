"""Matches ranks' records of one collective or message, and finds how long each waited. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

MESSAGES = frozenset({"send", "recv"})
# An operation on several ranks: rank -> index in that rank's operations, and the members that have
# not begun it.
Match = tuple[dict[int, int], set[int]]


@dataclass(frozen=True)
class Operation:
    """A collective or point-to-point operation on one rank.

    Attributes:
        name: as ``torch.distributed`` calls it.
        group: torch's name of its process group.
        members: the group's ranks; () for all.
        start_ns, duration_ns: from the first cell's begin; one that goes on lasts until now.
        run: of its cell.
        sequence, peer: see `wire.trace.Operations`.
        generation: see `wire.trace.What`.
        wait_ns: since when the rank's main thread waited for it, as far as that is known; None if
            it did not.
        is_open: it goes on.
        is_launch: on a GPU, of which only the launch is known.
        waited_ns: how long of it the last of its ranks had not come.
        last: the rank that came last; -1 where that is not known.
    """

    name: str
    group: str
    members: tuple[int, ...]
    start_ns: int
    duration_ns: int
    run: int
    sequence: int = 0
    peer: int = -1
    generation: int = 0
    wait_ns: int | None = None
    is_open: bool = False
    is_launch: bool = False
    waited_ns: int = 0
    last: int = -1

    @property
    def end_ns(self) -> int:
        """When the operation ended."""
        return self.start_ns + self.duration_ns

    def waited_for_ns(self, last_ns: int) -> int:
        """Return how long this operation waited for a rank that began it at `last_ns`."""
        return max(0, min(last_ns, self.end_ns) - self.start_ns)

    @property
    def is_message(self) -> bool:
        """Whether the operation is a send or receive between two ranks."""
        return self.name in MESSAGES


def lanes_of(operations: Iterable[Operation]) -> list[int]:
    """Return a row to draw each operation in, such that operations in one row do not overlap."""
    ends: list[int] = []
    lanes = []
    for one in operations:
        lane = next((lane for lane, end in enumerate(ends) if end <= one.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = one.end_ns
        lanes.append(lane)
    return lanes


def match(
    operations: Mapping[int, Sequence[Operation]],
    since_ns: Mapping[int, int] | None = None,
    cut: Iterable[int] = (),
) -> list[Match]:
    """Find which operations of different ranks are one, by process group and number on the group.

    Where the group is not known, an operation that a rank lacks is no match: the rank need not be
    a member.

    Args:
        operations: rank -> its own.
        since_ns: rank -> when its process began; it is not missed where it was not yet.
        cut: the ranks of which not all is known; they are not missed at all.
    """
    since_ns, cut = since_ns or {}, set(cut)
    found: dict[tuple[object, ...], dict[int, int]] = {}
    for rank, ours in operations.items():
        seen: dict[tuple[object, ...], int] = {}
        # From the end: a script that makes its groups a second time gives them the same names, and
        # their counts begin at one again.
        for index in reversed(range(len(ours))):
            one = ours[index]
            if not one.sequence or one.is_launch:
                continue
            key = _key(one, rank)
            seen[key] = seen.get(key, 0) + 1
            found.setdefault((*key, seen[key]), {})[rank] = index
    known, matched = frozenset(operations), []
    for of_ranks in found.values():
        rank, index = next(iter(of_ranks.items()))
        one = operations[rank][index]
        # A message is of two ranks, whatever the size of its group.
        expected = {rank, one.peer} if one.is_message else set(one.members or known)
        absent = expected - of_ranks.keys()
        first_ns = min(operations[rank][index].start_ns for rank, index in of_ranks.items())
        missing = {
            rank for rank in absent & known if rank not in cut and since_ns.get(rank, 0) <= first_ns
        }
        is_whole = absent <= known
        if one.group if missing else is_whole and len(of_ranks) > 1:
            matched.append((of_ranks, missing))
    return matched


def _key(one: Operation, rank: int) -> tuple[object, ...]:
    if one.is_message:
        ends = (rank, one.peer) if one.name == "send" else (one.peer, rank)
        return (one.generation, one.group, ends, one.sequence)
    return (one.generation, one.group or one.name, one.members, one.sequence)


def with_waits(
    operations: Mapping[int, Sequence[Operation]], matched: Iterable[Match]
) -> dict[int, list[Operation]]:
    """Return the operations with how long each waited for the last of its ranks, and which rank
    that was.
    """
    waited: dict[tuple[int, int], tuple[int, int]] = {}
    for of_ranks, missing in matched:
        begun = {rank: operations[rank][index] for rank, index in of_ranks.items()}
        late = max(begun, key=lambda rank: begun[rank].start_ns)
        for rank, one in begun.items():
            waited_ns = one.duration_ns if missing else one.waited_for_ns(begun[late].start_ns)
            waited[rank, of_ranks[rank]] = waited_ns, min(missing, default=late)
    return {
        rank: [
            replace(one, waited_ns=waited_ns, last=last)
            for index, one in enumerate(ours)
            for waited_ns, last in (waited.get((rank, index), (0, -1)),)
        ]
        for rank, ours in operations.items()
    }
