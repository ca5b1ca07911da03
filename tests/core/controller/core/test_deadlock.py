"""Which groups disagree, and which ranks wait for what will not come."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.deadlock import Tally, find_disagreements, find_stuck, must_be_healed
from cellmesh.wire.groups import GroupCount
from cellmesh.wire.status import RankState

from ....support.core_decisions import counted


def count(
    number: int = 0, ranks: tuple[int, ...] = (), name: str = "world", **messages: Any
) -> GroupCount:
    return GroupCount(name, ranks, number, **messages)


def state(*counts: GroupCount, in_: str = "", group: str = "world", **more: Any) -> RankState:
    wait = (group, more.get("waited_s", 5.0)) if in_ else ("", 0.0)
    where = (1, 7, 1, 1, "f", in_, "cpu", 0, *wait)
    return RankState(*where, counts=counts, making=more.get("making", ()))


# ---- disagreements

# The counts of ranks, how many ranks there are, and the groups that disagree.
GROUPS_OF_TWO = {
    0: (count(5), count(2, (0, 1), "a")),
    1: (count(5), count(1, (0, 1), "a")),
    2: (count(5), count(4, (2, 3), "b")),
    3: (count(5), count(4, (2, 3), "b")),
}
FROM_ANYONE = {
    0: counted(0, num_sent=((2, 1),)),
    1: counted(0, num_sent=((2, 2),)),
    2: counted(0, num_received=((-1, 2), (1, 1))),
}
TWO_SENT = counted(3, num_sent=((1, 2),))


def received(number: int) -> tuple[GroupCount, ...]:
    return counted(3, num_received=((0, number),))


DISAGREEMENTS: dict[str, tuple[Any, int, list[tuple[int, ...]]]] = {
    "the same number": ({0: counted(3), 1: counted(3)}, 2, []),
    "different numbers": ({0: counted(3), 1: counted(2)}, 2, [(0, 1)]),
    "a group that a rank has not made": ({0: counted(1), 1: ()}, 2, [(0, 1)]),
    "one that is not used yet": ({0: counted(0), 1: ()}, 2, []),
    "only that group is named": (GROUPS_OF_TWO, 4, [(0, 1)]),
    "nothing is known of a member": ({0: counted(3), 1: counted(2)}, 3, []),
    "all members are known": ({0: counted(3, (0, 1)), 1: counted(2, (0, 1))}, 3, [(0, 1)]),
    "a message that was not received": ({0: TWO_SENT, 1: received(1)}, 2, [(0, 1)]),
    "messages received from anyone": (FROM_ANYONE, 3, []),
    "one more than was sent": ({**FROM_ANYONE, 1: counted(0, num_sent=((2, 1),))}, 3, [(0, 1, 2)]),
}


@pytest.mark.parametrize(("counts", "num", "found"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_groups_that_disagree_are_found(counts: Any, num: int, found: Any) -> None:
    assert find_disagreements(counts, num, True) == found
    if any(each.num_sent for each in counts[0]):
        assert find_disagreements(counts, num, False) == [], "messages are not looked at"


def test_ranks_are_healed_if_one_is_broken_or_counts_disagree() -> None:
    agree = {0: state(count(1)), 1: state(count(1))}
    assert not must_be_healed(agree, 2)
    assert must_be_healed({0: state(count(1)), 1: state(count(2))}, 2)
    broken = RankState(1, -1, 0, 0, "", "", "cpu", 0, is_broken=True, counts=counted(1))
    assert must_be_healed({**agree, 1: broken}, 2)


# ---- what is known between runs


def test_tally_is_new_once_when_all_agree_and_again_until_all_agree() -> None:
    tally = Tally()
    tally.add((0, 1), counted(3))
    assert tally.find_new_disagreements((0, 1), 2) == []
    assert not tally.is_new
    tally.add((0,), counted(4))
    assert tally.find_new_disagreements((0, 1), 2) == [(0, 1)]
    assert tally.find_new_disagreements((0, 1), 2) == [(0, 1)]
    tally.replace(1, counted(4))
    assert tally.find_new_disagreements((0, 1), 2) == []
    tally.add((0,), counted(5))
    tally.forget((0, 1))
    assert tally.find_new_disagreements((0, 1), 2) == [], "new groups have begun nothing"
    tally.clear()
    assert tally.find_new_disagreements((0, 1), 2) == []


# ---- ranks that are stuck


def from_rank(rank: int, num: int, number: int = 0, in_: str = "") -> RankState:
    return state(count(number, num_received=((rank, num),)), in_=in_)


REDUCES, WAITS = state(count(3), in_="all_reduce"), state(count(3), in_="wait")
BEFORE, SAME = state(count(2)), state(count(3))
IN_GROUP = state(count(0), count(3, (0, 1), "a"), in_="all_reduce", group="a")
AT_STORE = state(count(1), in_="init_process_group", group="")
MAKES = state(count(1), in_="new_group", group="b", making=(0, 1, 2))
MADE, ONE, OTHER = (
    state(count(1), count(0, (0, 1, 2), "b")),
    state(count(1)),
    state(count(1), count(0, (1, 3), "b")),
)
RECEIVES = from_rank(1, 2, in_="recv")
SENDS = state(count(0, num_sent=((1, 2),)), in_="send")
FROM_ANY = from_rank(-1, 2, in_="recv")
SENT, SILENT = state(count(0, num_sent=((0, 1),))), state(count(0))

# The states of ranks, which of them have ended, and which are stuck; there are four ranks.
STUCK: dict[str, tuple[dict[int, RankState], set[int], list[int]]] = {
    "a rank ended without the collective": ({0: REDUCES, 1: BEFORE}, {1}, [0]),
    "a rank took part": ({0: REDUCES, 1: SAME}, {1}, []),
    "a rank still runs": ({0: REDUCES, 1: BEFORE}, set(), []),
    "a short wait": ({0: state(count(3), in_="all_reduce", waited_s=0.9), 1: BEFORE}, {1}, []),
    "an asynchronous collective": ({0: WAITS, 1: SAME, 2: BEFORE}, {1}, []),
    "one that a rank has not begun": ({0: WAITS, 1: SAME, 2: BEFORE}, {1, 2}, [0]),
    "no member of the group": ({0: IN_GROUP, 2: SILENT}, {2}, []),
    "a member of the group": ({0: IN_GROUP, 1: SILENT}, {1}, [0]),
    "all are needed at a store": ({0: AT_STORE, 1: ONE}, {1}, [0]),
    "a group that a member has not made": ({0: MAKES, 1: MADE, 2: ONE}, {1, 2}, [0]),
    "a group of the same name": ({0: MAKES, 1: OTHER, 2: MADE}, {1, 2}, [0]),
    "an ended rank that is no member": ({0: MAKES, 1: MADE, 2: ONE, 3: ONE}, {1, 3}, []),
    "no answer of a living rank": ({0: REDUCES}, {1}, []),
    "a sender ended without sending": ({0: RECEIVES, 1: SENT}, {1}, [0]),
    "a sender has sent": ({0: RECEIVES, 1: state(count(0, num_sent=((0, 2),)))}, {1}, []),
    "a receiver ended without receiving": ({0: SENDS, 1: from_rank(0, 1)}, {1}, [0]),
    "a message is no collective": ({0: from_rank(1, 2, 9, "recv"), 1: SAME, 2: SAME}, {2}, []),
    "a message is waited for": ({0: from_rank(1, 1, 3, "wait"), 1: SAME}, {1}, [0]),
    "a sender is left": ({0: FROM_ANY, 1: SENT, 2: SILENT, 3: SILENT}, {1, 2}, []),
    "no sender is left": ({0: FROM_ANY, 1: SENT, 2: SILENT, 3: SILENT}, {1, 2, 3}, [0]),
}


@pytest.mark.parametrize(("states", "ended", "found"), STUCK.values(), ids=STUCK)
def test_ranks_that_wait_in_vain_are_found(states: Any, ended: set[int], found: list[int]) -> None:
    assert find_stuck(states, set(states) - ended, ended, set(), 4, 1.0) == found


def test_dead_ranks_are_waited_for_in_vain() -> None:
    assert find_stuck({0: REDUCES}, {0}, set(), {3}, 4, 1.0) == [0]
    assert find_stuck({0: MAKES, 1: MADE}, {0}, {1}, {2}, 4, 1.0) == [0]
