"""Finds deadlocks: ranks that wait for operations of other ranks that can never match theirs. Pure;
`verdict_text` describes them to users.

Two facts prove a deadlock: ranks have begun collectives of different kinds, sizes or dtypes under
one number of a group; or ranks wait in a circle, each for an operation that another would begin
only after its own. An uncertain wait does not count: once the root of a broadcast has begun, for
example, its data may be on their way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from ...wire.groups import Begun, InFlight
from ...wire.status import RankState
from .group_progress import MESSAGES, GroupProgress, Key, find_lacking, progress_of
from .verdict_text import Waits, describe_verdict

# Collectives that some ranks may end before others have begun them.
_FROM_ROOT, _TO_ROOT = frozenset({"broadcast", "scatter"}), frozenset({"reduce", "gather"})
_MESSAGE_CALLS = MESSAGES | {"isend", "irecv", "batch_isend_irecv"}
# Ranks that wait for each other in longer chains are not looked at, as the first may go on.
_MAX_ROUNDS = 16


class Verdict(msgspec.Struct, frozen=True):
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
        absent: ranks that will begin no more operations. Living ranks that did not answer are not
            counted, as they may have begun any.
        num_ranks: number of ranks of the mesh.
        patience_s: how long a rank must have waited to count as stuck, in seconds.
        dead: dead ranks, which count as absent.
    """
    lacking = find_lacking(states)
    blocked = {
        rank: state
        for rank, state in sorted(states.items())
        if state.collective and state.waited_s >= patience_s and rank not in absent
        if _is_blocked(rank, state, lacking)
    }
    never = {rank for rank in absent if rank in states}.union(dead) - blocked.keys()
    groups = progress_of(states, num_ranks)
    _find_mismatches(groups, blocked)
    stuck = _find_stuck(groups, blocked, never, lacking, num_ranks)
    if not stuck:
        return None
    waits = Waits(groups, stuck, never, dead)
    text = "; ".join(describe_verdict(waits))
    return Verdict(tuple(stuck), f"these cannot meet: {text}")


def _is_blocked(rank: int, state: RankState, lacking: Mapping[Key, set[int]]) -> bool:
    if state.making:  # it goes on if all others have made the group
        return lacking[state.group, state.making] != {rank}
    return bool(state.in_flight) or not state.group  # the operation may just have ended


def _find_mismatches(groups: Mapping[Key, GroupProgress], blocked: Mapping[int, RankState]) -> None:
    """Set `mismatch_at` of each process group to the number of the first awaited collective that
    its members have begun with different kinds, sizes or dtypes.
    """
    awaited: dict[str, set[int]] = defaultdict(set)
    for state in blocked.values():
        for one in state.in_flight:
            if one.name not in MESSAGES:
                awaited[one.group].add(one.number)
    for group in groups.values():
        numbers = awaited.get(group.first.name, set())
        seen: dict[int, Begun] = {}
        for count in group.counts.values() if numbers else ():
            for begun in count.recent:
                if begun.number in numbers and seen.setdefault(begun.number, begun) != begun:
                    group.mismatch_at = min(begun.number, group.mismatch_at or begun.number)


def _find_stuck(
    groups: Mapping[Key, GroupProgress],
    blocked: Mapping[int, RankState],
    never: set[int],
    lacking: Mapping[Key, set[int]],
    num_ranks: int,
) -> dict[int, RankState]:
    """Return the blocked ranks that can never go on, as each waits for another of them or for a
    rank that will begin no more operations (`never`); keep only their operations in flight that
    cannot end.

    All blocked ranks count as stuck at first. Each round takes out those that may go on although
    all stuck ranks stand: one of their operations in flight may end, and it is not known which of
    them a rank waits for. A rank stays that waits for one of `never`.
    """
    by_name = {
        (rank, count.name): group
        for group in groups.values()
        for rank, count in group.counts.items()
    }

    def cannot_end(rank: int) -> tuple[InFlight, ...]:
        """Return the operations of a rank that cannot end unless a rank of `halted` goes on."""
        flights = ((one, by_name.get((rank, one.group))) for one in blocked[rank].in_flight)
        return tuple(one for one, group in flights if not _may_end(rank, one, group, halted))

    def halt(ranks: set[int]) -> set[int]:
        for group in groups.values():
            group.reached = group.least_of(ranks)
            group.num_free = sum(rank not in ranks for rank in group.members)
        return ranks

    for group in groups.values():
        group.lost_from = min(group.least_of(never) + 1, group.mismatch_at or math.inf)
    # A rank that makes a group, or waits for a store, is in no operation. It waits for any other.
    apart = {rank for rank, state in blocked.items() if state.making or not state.in_flight}
    halted = halt(never)
    lost = {
        rank
        for rank, state in blocked.items()
        if (
            never.intersection(lacking.get((state.group, state.making), never))
            if rank in apart
            else _waits_for(never, rank, state, by_name.get((rank, state.group)))
        )
    }
    stuck = set(blocked)
    for _ in range(_MAX_ROUNDS):
        halted = halt(stuck | never)
        free = {
            rank for rank in stuck - apart if len(cannot_end(rank)) < len(blocked[rank].in_flight)
        }
        if len(halted) < num_ranks or stuck <= apart:
            free |= stuck & apart
        free -= lost
        if not free:
            break
        stuck -= free
    else:
        stuck = lost
    return {
        rank: msgspec.structs.replace(
            blocked[rank], in_flight=() if rank in apart else cannot_end(rank)
        )
        for rank in sorted(stuck)
    }


def _waits_for(never: set[int], rank: int, state: RankState, group: GroupProgress | None) -> bool:
    """Return whether a rank waits in a call that cannot end unless a rank of `never` goes on.

    The last message with a peer counts, as gloo keeps those in flight that are not waited for.
    """
    is_in_message = state.collective in _MESSAGE_CALLS
    for one in state.in_flight:
        if group is None or one.group != state.group or (one.name in MESSAGES) != is_in_message:
            continue
        number = one.number
        if one.name == "send":
            number = group.sent.get((rank, one.peer), number)
        elif one.name == "recv":
            number = group.received.get((one.peer, rank), number)
        if not _may_end(rank, msgspec.structs.replace(one, number=number), group, never):
            return True
    return False


def _may_end(rank: int, one: InFlight, group: GroupProgress | None, halted: set[int]) -> bool:
    """Return whether an operation that a rank has begun may end even if no rank of `halted` goes
    on.
    """
    if group is None or one.gives_up:
        return True
    any_other = group.num_free > (rank not in halted)
    if one.name == "recv_anysource":
        received = sum(number for _, number in group.counts[rank].num_received)
        return any_other or received <= group.sent_to[rank]
    if one.name == "send":  # the peer may receive it in a receive from any source
        begun = group.received.get((rank, one.peer), 0) + group.received.get((-1, one.peer), 0)
        return begun >= one.number or one.peer not in halted
    if one.name == "recv":
        return group.sent.get((one.peer, rank), 0) >= one.number or one.peer not in halted
    if one.number >= group.lost_from:
        return False
    recent = group.counts[rank].recent
    root = next((begun.root for begun in recent if begun.number == one.number), -1)
    if one.name in _FROM_ROOT and root not in (rank, -1):
        return group.number_of(root) >= one.number or root not in halted
    if one.name in _FROM_ROOT or (one.name in _TO_ROOT and root != rank):
        return any_other or group.most_beside(rank) >= one.number
    return one.number <= group.reached
