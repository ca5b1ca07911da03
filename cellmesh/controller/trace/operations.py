"""Matches collectives and messages across ranks; finds how long each rank waited for the others,
and which rank begins collectives late. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_MESSAGES = frozenset({"send", "recv"})


@dataclass(frozen=True)
class Operation:
    """A collective or point-to-point operation on one rank.

    Attributes:
        name: name of its function in ``torch.distributed``.
        group: torch's name of its process group.
        members: ranks of the group; () for all ranks of the mesh.
        start_ns, duration_ns: start, counted from the start of the first cell, and length; an
            unfinished operation lasts until the time of the query.
        run: number of its cell's run.
        sequence, peer: see `wire.trace.Past`.
        generation: see `wire.trace.What`.
        wait_ns: time at which the rank's main thread began to wait for it, as far as known; None
            if the thread did not wait.
        is_open: whether it has not finished.
        is_launch: whether it is on a GPU and only its launch was recorded.
        waited_ns: time from its start until the last of its ranks began it.
        last: the rank that began it last; -1 if unknown.
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
        """The time at which the operation ended."""
        return self.start_ns + self.duration_ns

    @property
    def is_message(self) -> bool:
        """Whether the operation is a send or receive between two ranks."""
        return self.name in _MESSAGES

    def key(self, rank: int) -> tuple[object, ...]:
        """Return a key that is equal for one operation on all of its ranks.

        Args:
            rank: the rank that executed this side of the operation.
        """
        if self.is_message:
            ends = (rank, self.peer) if self.name == "send" else (self.peer, rank)
            return (self.generation, self.group, ends, self.sequence)
        return (self.generation, self.group or self.name, self.members, self.sequence)


def with_waits(operations: Mapping[int, Sequence[Operation]]) -> dict[int, list[Operation]]:
    """Return the operations with their waits: how long each waited for the last of its ranks, and
    for which rank. An operation that one of its ranks has no record of has no waits.

    Operations of different ranks are matched by process group and sequence number. If the process
    group is not known, its members are the ranks that have begun the operation.

    Args:
        operations: rank -> its operations, in order.
    """
    waited = {rank: list(ours) for rank, ours in operations.items()}
    for indices in _alike(operations).values():
        begun = {rank: operations[rank][index] for rank, index in indices.items()}
        first, one = next(iter(begun.items()))
        # A message has two ranks, whatever the size of its group.
        expected = {first, one.peer} if one.is_message else set(one.members)
        if one.group and not expected:
            expected = {*operations}
        if len(begun) == 1 or not expected <= begun.keys():
            continue
        late = max(begun, key=lambda rank: begun[rank].start_ns)
        for rank, each in begun.items():
            waited_ns = max(0, min(begun[late].start_ns, each.end_ns) - each.start_ns)
            waited[rank][indices[rank]] = replace(each, waited_ns=waited_ns, last=late)
    return waited


def _alike(
    operations: Mapping[int, Sequence[Operation]],
) -> dict[tuple[object, ...], dict[int, int]]:
    """Match equal operations across ranks: return, for each, the ranks that have begun it, with its
    index in each rank's list.
    """
    found: dict[tuple[object, ...], dict[int, int]] = {}
    for rank, ours in operations.items():
        seen: Counter[tuple[object, ...]] = Counter()
        # From the end: a script that makes its groups a second time gives them the same names, and
        # their counts begin at one again.
        for index in reversed(range(len(ours))):
            if ours[index].sequence and not ours[index].is_launch:
                key = ours[index].key(rank)
                seen[key] += 1
                found.setdefault((*key, seen[key]), {})[rank] = index
    return found


@dataclass(frozen=True)
class Lateness:
    """How late one rank began the collectives that it shares with others.

    Attributes:
        rank: the rank.
        num_last: number of collectives that it began last.
        awaited_s: time that the other ranks waited for it in these collectives, in all.
        num_others: number of other ranks.
    """

    rank: int
    num_last: int
    awaited_s: float
    num_others: int = 1

    @property
    def awaited_each_s(self) -> float:
        """How long each of the other ranks waited for this rank on average, in seconds."""
        return self.awaited_s / max(1, self.num_others)


def lateness_of(operations: Mapping[int, Iterable[Operation]]) -> dict[int, Lateness]:
    """Return how late each rank began collectives; messages do not count, because one side always
    waits.

    Args:
        operations: rank -> its operations with their waits (`with_waits`).
    """
    num_last: Counter[int] = Counter()
    awaited_ns: Counter[int] = Counter()
    for rank, ours in operations.items():
        for one in ours:
            if not one.is_message:
                awaited_ns[one.last] += one.waited_ns
                num_last[rank] += one.last == rank
    return {
        rank: Lateness(rank, num_last[rank], awaited_ns[rank] / 1e9, len(operations) - 1)
        for rank in operations
    }


def find_straggler(lateness: Mapping[int, Lateness], took_s: float) -> int | None:
    """Return the rank that began collectives noticeably later than the others, if any.

    Args:
        lateness: rank -> its lateness, for all ranks.
        took_s: how long the cells took, in seconds.
    """
    if not lateness:
        return None
    worst = max(lateness.values(), key=lambda one: one.awaited_s)
    is_late = worst.awaited_s >= 0.05 * took_s * max(1, len(lateness) - 1)
    return worst.rank if worst.num_last and is_late else None


def describe_lateness(lateness: Mapping[int, Lateness], took_s: float) -> str:
    """Describe the rank that `find_straggler` finds; "" if no rank waited for another."""
    num = sum(one.num_last for one in lateness.values())
    straggler = find_straggler(lateness, took_s)
    if straggler is None:
        return f"no straggler: ranks began {num} collectives at about the same time" if num else ""
    worst = lateness[straggler]
    each = "each other rank" if worst.num_others > 1 else "the other rank"
    factor, unit = (1, "s") if took_s >= 1 else (1e3, "ms")
    waited = min(worst.awaited_each_s, took_s) * factor
    return (
        f"rank {worst.rank} was last in {worst.num_last} of {num} collectives; {each} waited "
        f"{waited:.3g} of {took_s * factor:.3g} {unit} for it"
    )
