"""Which groups disagree."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.group_progress import Tally, find_disagreements, must_be_healed
from cellmesh.wire.groups import GroupCount
from cellmesh.wire.status import RankState

from ....support.core_decisions import counted


def count(
    number: int = 0, ranks: tuple[int, ...] = (), name: str = "world", **messages: Any
) -> GroupCount:
    return GroupCount(name, ranks, number, **messages)


def state(*counts: GroupCount, is_broken: bool = False) -> RankState:
    return RankState(1, -1, 0, 0, "", "", "cpu", 0, is_broken=is_broken, counts=counts)


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
FROM_ANOTHER = {
    0: counted(0, num_sent=((2, 1),)),
    1: counted(0),
    2: counted(0, num_received=((1, 1),)),
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
    "a message to another rank": (FROM_ANOTHER, 3, [(0, 1, 2)]),
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
    assert must_be_healed({**agree, 1: state(count(1), is_broken=True)}, 2)


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
