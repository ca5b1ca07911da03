"""Decides, from how many operations each rank has begun per process group, which ranks are stuck
and which groups disagree.

Ranks of a group pair up their collectives by order: a rank that has begun fewer than another has
not come to those yet. What a rank waits for will never come if the ranks that are missing have
ended the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...wire.groups import GroupCount
from ...wire.status import RankState
from .group_progress import GroupProgress, find_lacking, progress_of, read_progress

Counts = Mapping[int, Sequence[GroupCount]]

# Calls that wait for messages and not for collectives; and those that may wait for either.
_MESSAGES = frozenset({"send", "isend", "recv", "irecv", "batch_isend_irecv", "recv_anysource"})
_WAITS = frozenset({"wait", "synchronize"})


def find_disagreements(
    counts: Counts, num_ranks: int, with_messages: bool
) -> list[tuple[int, ...]]:
    """Return the members of each group whose members began different numbers of collectives.

    Args:
        counts: rank -> its groups. Groups with a member that is missing here are passed over.
        num_ranks: size of the mesh.
        with_messages: also compare what members have sent with what their peers have received.
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
        """Sum by (sender, receiver), with sender -1 where a receiver takes messages of any rank."""
        sums: Counter[tuple[int, int]] = Counter()
        for (sender, receiver), number in numbers.items():
            sums[-1 if receiver in from_anyone else sender, receiver] += number
        return sums

    return summed_up(group.sent) != summed_up(group.received)


def must_be_healed(states: Mapping[int, RankState], num_ranks: int) -> bool:
    """Return whether idle ranks have begun different numbers of collectives on a group, so that
    their next ones would not match.
    """
    counts = {rank: state.counts for rank, state in states.items()}
    is_broken = any(state.is_broken for state in states.values())
    return is_broken or bool(find_disagreements(counts, num_ranks, with_messages=True))


class Tally:
    """How many operations each rank has begun per process group, as last reported between runs.

    Attributes:
        is_new: something was added since disagreements were last looked for, or there were some.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, GroupCount]] = {}
        self.is_new = False

    def add(self, ranks: Iterable[int], counts: Sequence[GroupCount]) -> None:
        """Note the numbers of operations that these ranks report after a run that ended well."""
        for rank in ranks:
            self._counts.setdefault(rank, {}).update((count.name, count) for count in counts)
        self.is_new = True

    def replace(self, rank: int, counts: Sequence[GroupCount]) -> None:
        """Replace all numbers of operations that are noted of one rank by these."""
        self._counts[rank] = {count.name: count for count in counts}

    def forget(self, ranks: Iterable[int]) -> None:
        """Drop these ranks' numbers of operations: their groups are new, or they have none."""
        for rank in ranks:
            self._counts.pop(rank, None)

    def clear(self) -> None:
        """Drop the numbers of operations of all ranks: all ranks are new."""
        self._counts.clear()
        self.is_new = False

    def find_new_disagreements(self, ranks: Iterable[int], num_ranks: int) -> list[tuple[int, ...]]:
        """Return groups of idle ranks that disagree (`find_disagreements`); costs little if no
        count was added since the last call.
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
    """Return the ranks that wait in a collective for a rank that will not join it.

    Args:
        states: what ranks do, as far as they answered; with all their groups' counts.
        waiting: ranks that have not ended the run.
        absent: ranks that will begin nothing more in it. Of one that lives and did not answer
            nothing is assumed.
        dead: ranks that are dead; absent, too.
        num_ranks: size of the mesh.
        patience_s: how long a rank must have waited.
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
        elif waits_on is None:  # a store is waited for, and everybody is needed
            is_stuck = bool(missing - {rank})
        else:
            is_stuck = _waits_for(state, rank, waits_on)
        found += [rank] if is_stuck else []
    return found


def _waits_for(state: RankState, rank: int, group: GroupProgress) -> bool:
    """Return whether a rank waits on a group for members that will begin nothing more."""
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
    if any(  # what they received from anyone may have been this rank's
        number > received.get((rank, peer), 0) + received.get((-1, peer), 0)
        for peer, number in own.num_sent
        if peer in group.missing
    ):
        return True
    is_alone = 0 < len(group.members) - 1 == len(group.missing - {rank})
    is_owed = from_peer.get(-1, 0) > 0 and sum(from_peer.values()) > group.sent_to[rank]
    return is_alone and is_owed
