"""Finds ranks that are stuck, and process groups whose members disagree, from the number of
operations that each rank has begun per group.

Ranks of a group pair up their collectives by order: a rank that has begun fewer than another has
not reached the rest yet. A rank waits in vain if the ranks that its operation lacks have ended the
run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...wire.groups import GroupCount
from ...wire.status import RankState
from .group_progress import GroupProgress, find_lacking, progress_of, read_progress

Counts = Mapping[int, Sequence[GroupCount]]

# Calls that wait for point-to-point messages, and calls that wait for a message or a collective.
_MESSAGES = frozenset({"send", "isend", "recv", "irecv", "batch_isend_irecv", "recv_anysource"})
_WAITS = frozenset({"wait", "synchronize"})


def find_disagreements(
    counts: Counts, num_ranks: int, with_messages: bool
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
        for group in read_progress(counts.items(), num_ranks).values()
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
        """Return the groups of idle ranks that disagree (`find_disagreements`); cheap if no count
        was added since the last call.
        """
        if not self.is_new:
            return []
        counts = {rank: tuple(self._counts.get(rank, {}).values()) for rank in ranks}
        found = find_disagreements(counts, num_ranks, with_messages=False)
        self.is_new = bool(found)
        return found


def find_stuck(
    states: Mapping[int, RankState],
    waiting: Collection[int],
    absent: Collection[int],
    dead: Collection[int],
    num_ranks: int,
    patience_s: float,
) -> list[int]:
    """Return the ranks that wait in an operation for a rank that will not join it.

    Args:
        states: state of each rank that answered, with the counts of all its groups.
        waiting: ranks that have not ended the run.
        absent: ranks that will begin no more operations in the run. Living ranks that did not
            answer are not counted.
        dead: dead ranks, which count as absent.
        num_ranks: number of ranks of the mesh.
        patience_s: how long a rank must have waited to count as stuck, in seconds.
    """
    missing = {rank for rank in absent if rank in states or rank in dead} | set(dead)
    by_name: dict[tuple[int, str], GroupProgress] = {}
    for group in progress_of(states, num_ranks).values():
        group.missing = missing.intersection(group.members)
        group.least_of_missing = min(map(group.number_of, group.missing), default=math.inf)
        by_name |= {(rank, group.first.name): group for rank in group.counts}
    lacking = {key: missing & ranks for key, ranks in find_lacking(states).items()}
    found = []
    for rank in sorted(waiting):
        state = states.get(rank)
        if state is None or not state.collective or state.waited_s < patience_s:
            continue
        waits_on = by_name.get((rank, state.group))
        if state.making:
            is_stuck = bool(lacking[state.group, state.making] - {rank})
        elif waits_on is None:  # it waits in a store, where every rank is needed
            is_stuck = bool(missing - {rank})
        else:
            is_stuck = _waits_for(state, rank, waits_on)
        found += [rank] if is_stuck else []
    return found


def _waits_for(state: RankState, rank: int, group: GroupProgress) -> bool:
    """Return whether a rank waits on a group for members that will begin no more operations."""
    if state.collective not in _MESSAGES and group.least_of_missing < group.number_of(rank):
        return True
    if state.collective not in _MESSAGES and state.collective not in _WAITS:
        return False
    own, sent, received = group.counts[rank], group.sent, group.received
    from_peer = dict(own.num_received)
    if any(
        from_peer[peer] > sent.get((peer, rank), 0) for peer in from_peer.keys() & group.missing
    ):
        return True
    if any(  # messages that peers received from any source may have been this rank's
        number > received.get((rank, peer), 0) + received.get((-1, peer), 0)
        for peer, number in own.num_sent
        if peer in group.missing
    ):
        return True
    is_alone = 0 < len(group.members) - 1 == len(group.missing - {rank})
    is_owed = from_peer.get(-1, 0) > 0 and sum(from_peer.values()) > group.sent_to[rank]
    return is_alone and is_owed
