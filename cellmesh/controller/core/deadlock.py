"""Decides, from how many operations each rank has begun per process group, which ranks are stuck
and which groups disagree.

Ranks of a group pair up their collectives by order: a rank that has begun fewer than another has
not come to those yet. What a rank waits for will never come if the ranks that are missing have
ended the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...wire.groups import GroupCount
from ...wire.status import RankState

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
    return [
        rank
        for rank in sorted(waiting)
        if rank in states
        and states[rank].collective
        and states[rank].waited_s >= patience_s
        and _waits_for(states, rank, missing - {rank}, num_ranks)
    ]


def _waits_for(
    states: Mapping[int, RankState], rank: int, missing: set[int], num_ranks: int
) -> bool:
    state = states[rank]
    own = _count_of(state, state.group)
    if own is None:  # a group is being made, or a store waited for: everybody is needed
        return bool(missing)
    peers = {
        peer: _count_of(states[peer], own.name) if peer in states else None
        for peer in range(num_ranks)
    }
    members = set(members_of(own, num_ranks)) - {rank}
    missing = missing & members
    if state.collective not in _MESSAGES and any(
        (theirs.num_collectives if theirs is not None else 0) < own.num_collectives
        for theirs in (peers[peer] for peer in missing)
    ):
        return True
    if state.collective not in _MESSAGES and state.collective not in _WAITS:
        return False
    if any(_message_is_missing(own, peers[peer], rank, peer) for peer in missing):
        return True
    return (
        bool(members)
        and missing == members
        and _is_owed_by_anyone(own, [peers[peer] for peer in members], rank)
    )


def _message_is_missing(own: GroupCount, theirs: GroupCount | None, rank: int, peer: int) -> bool:
    """Return whether a rank waits for a send or receive that its peer has not begun."""
    their_sent = dict(theirs.num_sent).get(rank, 0) if theirs is not None else 0
    their_received = dict(theirs.num_received) if theirs is not None else {}
    if dict(own.num_received).get(peer, 0) > their_sent:
        return True
    # What they received from anyone may have been ours.
    return dict(own.num_sent).get(peer, 0) > their_received.get(rank, 0) + their_received.get(-1, 0)


def _is_owed_by_anyone(own: GroupCount, others: Iterable[GroupCount | None], rank: int) -> bool:
    """Return whether a rank waits in a receive from any rank, and no rank has sent."""
    if dict(own.num_received).get(-1, 0) == 0:
        return False
    num_sent = sum(dict(theirs.num_sent).get(rank, 0) for theirs in others if theirs is not None)
    return sum(number for _, number in own.num_received) > num_sent


def _count_of(state: RankState, name: str) -> GroupCount | None:
    return next((count for count in state.counts if count.name == name), None)
