"""Decides, from how many operations each rank has begun per process group, which ranks are stuck
and which groups disagree.

Ranks of a group pair up their collectives by order: a rank that has begun fewer than another has
not come to those yet. What a rank waits for will never come if the ranks that are missing have
ended the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...wire.groups import GroupCount
from ...wire.status import RankState
from .group_progress import GroupProgress, find_lacking, read_progress

Key = tuple[str, tuple[int, ...]]
Counts = Mapping[int, Sequence[GroupCount]]

# Calls that wait for messages and not for collectives; and those that may wait for either.
_MESSAGES = frozenset({"send", "isend", "recv", "irecv", "batch_isend_irecv", "recv_anysource"})
_WAITS = frozenset({"wait", "synchronize"})


def members_of(count: GroupCount, num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of the process group that a `GroupCount` is of."""
    return count.ranks or tuple(range(num_ranks))


def find_disagreements(
    counts: Counts, num_ranks: int, with_messages: bool
) -> list[tuple[int, ...]]:
    """Return the members of each group whose members began different numbers of collectives.

    Args:
        counts: rank -> its groups. Groups with a member that is missing here are passed over.
        num_ranks: size of the mesh.
        with_messages: also compare what members have sent with what their peers have received.
    """
    groups: dict[Key, dict[int, GroupCount]] = {}
    for rank, own in counts.items():
        for count in own:
            groups.setdefault((count.name, count.ranks), {})[rank] = count
    found = []
    for by_rank in groups.values():
        members = members_of(next(iter(by_rank.values())), num_ranks)
        if not counts.keys() >= set(members):
            continue
        begun = {by_rank[rank].num_collectives if rank in by_rank else 0 for rank in members}
        if len(begun) > 1 or (with_messages and _messages_differ(by_rank)):
            found.append(members)
    return found


def _messages_differ(by_rank: Mapping[int, GroupCount]) -> bool:
    sent = {(rank, peer): n for rank, count in by_rank.items() for peer, n in count.num_sent if n}
    received = {
        (peer, rank): n for rank, count in by_rank.items() for peer, n in count.num_received if n
    }
    from_anyone = {rank for peer, rank in received if peer < 0}
    return _summed_up(sent, from_anyone) != _summed_up(received, from_anyone)


def _summed_up(
    numbers: Mapping[tuple[int, int], int], receivers: Collection[int]
) -> dict[tuple[int, int], int]:
    """Return numbers of messages by (sender, receiver), with sender -1 for each receiver that takes
    messages from any rank.
    """
    sums: dict[tuple[int, int], int] = {}
    for (sender, receiver), number in numbers.items():
        pair = (-1 if receiver in receivers else sender, receiver)
        sums[pair] = sums.get(pair, 0) + number
    return sums


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
    groups = [_Awaited.of(group, missing) for group in read_progress(states, num_ranks).values()]
    by_name = {(rank, one.name): one for one in groups for rank in one.group.counts}
    lacking = {key: missing & ranks for key, ranks in find_lacking(states).items()}
    found = []
    for rank in sorted(waiting):
        state = states.get(rank)
        if state is None or not state.collective or state.waited_s < patience_s:
            continue
        awaited = by_name.get((rank, state.group))
        if state.making:
            is_stuck = bool(lacking[state.group, state.making] - {rank})
        elif awaited is None:  # a store is waited for, and everybody is needed
            is_stuck = bool(missing - {rank})
        else:
            is_stuck = _waits_for(state, rank, awaited)
        if is_stuck:
            found.append(rank)
    return found


@dataclass(frozen=True)
class _Awaited:
    """A group, and those of its members that will begin nothing more; `lowest` is the least number
    of collectives that one of these has begun.
    """

    group: GroupProgress
    missing: frozenset[int]
    lowest: float

    @classmethod
    def of(cls, group: GroupProgress, missing: Collection[int]) -> _Awaited:
        gone = frozenset(rank for rank in group.members if rank in missing)
        return cls(group, gone, min(map(group.number_of, gone), default=math.inf))

    @property
    def name(self) -> str:
        return self.group.first.name


def _waits_for(state: RankState, rank: int, awaited: _Awaited) -> bool:
    """Return whether a rank waits on a group for members that will begin nothing more."""
    group, missing = awaited.group, awaited.missing
    if state.collective not in _MESSAGES and awaited.lowest < group.number_of(rank):
        return True
    if state.collective not in _MESSAGES and state.collective not in _WAITS:
        return False
    own = group.counts[rank]
    if any(
        number > group.sent.get((peer, rank), 0)
        for peer, number in own.num_received
        if peer in missing
    ):
        return True
    received = group.received
    if any(  # what they received from anyone may have been ours
        number > received.get((rank, peer), 0) + received.get((-1, peer), 0)
        for peer, number in own.num_sent
        if peer in missing
    ):
        return True
    others = len(group.members) - 1
    is_alone = 0 < others == len(missing - {rank})
    return is_alone and _is_owed_by_anyone(own, group.sent_to[rank])


def _is_owed_by_anyone(own: GroupCount, num_sent: int) -> bool:
    """Return whether a rank waits in a receive from any rank, given how many messages were sent to
    it.
    """
    by_peer = dict(own.num_received)
    return by_peer.get(-1, 0) > 0 and sum(by_peer.values()) > num_sent
