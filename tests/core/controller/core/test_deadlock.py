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


def state(
    *counts: GroupCount,
    in_: str = "",
    group: str = "world",
    waited_s: float = 5.0,
    making: tuple[int, ...] = (),
) -> RankState:
    return RankState(
        1,
        7,
        1,
        1,
        "f",
        in_,
        "cpu",
        0,
        group if in_ else "",
        waited_s if in_ else 0.0,
        counts=counts,
        making=making,
    )


# ---- disagreements


def test_members_that_have_begun_the_same_number_agree() -> None:
    assert find_disagreements({0: counted(3), 1: counted(3)}, 2, True) == []


def test_members_that_have_begun_different_numbers_disagree() -> None:
    assert find_disagreements({0: counted(3), 1: counted(2)}, 2, True) == [(0, 1)]


def test_rank_without_a_group_has_begun_nothing_on_the_group() -> None:
    assert find_disagreements({0: counted(1), 1: ()}, 2, True) == [(0, 1)]
    assert find_disagreements({0: counted(0), 1: ()}, 2, True) == []


def test_only_the_group_that_disagrees_is_named() -> None:
    counts = {
        0: (count(5), count(2, (0, 1), "a")),
        1: (count(5), count(1, (0, 1), "a")),
        2: (count(5), count(4, (2, 3), "b")),
        3: (count(5), count(4, (2, 3), "b")),
    }
    assert find_disagreements(counts, 4, True) == [(0, 1)]


def test_groups_with_a_member_of_which_nothing_is_known_are_passed_over() -> None:
    assert find_disagreements({0: counted(3), 1: counted(2)}, 3, True) == []
    assert find_disagreements({0: counted(3, (0, 1)), 1: counted(2, (0, 1))}, 3, True) == [(0, 1)]


@pytest.mark.parametrize("with_messages", [True, False])
def test_a_message_that_was_not_received_is_a_disagreement_if_messages_are_looked_at(
    with_messages: bool,
) -> None:
    counts = {0: counted(3, num_sent=((1, 2),)), 1: counted(3, num_received=((0, 1),))}
    assert find_disagreements(counts, 2, with_messages) == ([(0, 1)] if with_messages else [])


def test_messages_that_were_received_agree() -> None:
    counts = {0: counted(3, num_sent=((1, 2),)), 1: counted(3, num_received=((0, 2),))}
    assert find_disagreements(counts, 2, True) == []


def test_messages_received_from_anyone_agree_with_what_all_have_sent() -> None:
    counts = {
        0: counted(0, num_sent=((2, 1),)),
        1: counted(0, num_sent=((2, 2),)),
        2: counted(0, num_received=((-1, 2), (1, 1))),
    }
    assert find_disagreements(counts, 3, True) == []
    counts[1] = counted(0, num_sent=((2, 1),))
    assert find_disagreements(counts, 3, True) == [(0, 1, 2)]


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


def test_ranks_whose_groups_are_new_have_begun_nothing() -> None:
    tally = Tally()
    tally.add((0,), counted(4))
    tally.forget((0, 1))
    assert tally.find_new_disagreements((0, 1), 2) == []
    tally.add((0,), counted(4))
    tally.clear()
    assert tally.find_new_disagreements((0, 1), 2) == []


# ---- who is stuck


def stuck(
    states: dict[int, RankState],
    absent: set[int],
    dead: set[int] | None = None,
    waiting: Any = None,
) -> list[int]:
    waiting = set(states) - absent if waiting is None else waiting
    return find_stuck(states, waiting, absent, dead or set(), 4, 1.0)


def test_rank_is_stuck_waiting_for_a_rank_that_ended_without_the_collective() -> None:
    states = {0: state(count(3), in_="all_reduce"), 1: state(count(2))}
    assert stuck(states, {1}) == [0]


def test_rank_is_not_stuck_waiting_for_a_rank_that_took_part() -> None:
    states = {0: state(count(3), in_="all_reduce"), 1: state(count(3))}
    assert stuck(states, {1}) == []


def test_rank_is_not_stuck_waiting_for_a_rank_that_still_runs() -> None:
    states = {0: state(count(3), in_="all_reduce"), 1: state(count(2))}
    assert stuck(states, set()) == []


def test_rank_is_not_stuck_without_a_long_wait() -> None:
    ended = state(count(2))
    assert stuck({0: state(count(3), in_="all_reduce", waited_s=0.9), 1: ended}, {1}) == []
    assert stuck({0: state(count(3)), 1: ended}, {1}) == []


def test_an_asynchronous_collective_that_an_ended_rank_has_begun_counts() -> None:
    states = {0: state(count(3), in_="wait"), 1: state(count(3)), 2: state(count(2))}
    assert stuck(states, {1}) == []
    assert stuck(states, {1, 2}) == [0]


def test_only_members_of_the_group_matter() -> None:
    own = state(count(0), count(3, (0, 1), "a"), in_="all_reduce", group="a")
    assert stuck({0: own, 2: state(count(0))}, {2}) == []
    assert stuck({0: own, 1: state(count(0))}, {1}) == [0]


def test_all_are_needed_where_a_store_is_waited_for() -> None:
    states = {0: state(count(1), in_="init_process_group", group=""), 1: state(count(1))}
    assert stuck(states, {1}) == [0]
    assert stuck(states, set()) == []


def test_rank_that_makes_a_group_needs_the_members_that_have_not_made_it() -> None:
    makes = state(count(1), in_="new_group", group="b", making=(0, 1, 2))
    made, ended = state(count(1), count(0, (0, 1, 2), "b")), state(count(1))
    other = state(count(1), count(0, (1, 3), "b"))
    assert stuck({0: makes, 1: made, 2: ended}, {1, 2}) == [0]
    assert stuck({0: makes, 1: made, 2: made}, {1, 2}) == []
    assert stuck({0: makes, 1: other, 2: made}, {1, 2}) == [0]
    assert stuck({0: makes, 1: made, 2: ended, 3: ended}, {1, 3}) == []
    assert stuck({0: makes, 1: made}, {1}, dead={2}) == [0]


def test_rank_is_stuck_waiting_for_a_dead_rank() -> None:
    states = {0: state(count(1), in_="all_reduce")}
    assert stuck(states, set(), dead={3}) == [0]


def test_living_rank_without_an_answer_counts_as_running() -> None:
    assert stuck({0: state(count(1), in_="all_reduce")}, {1}) == []


def test_receiver_is_stuck_when_the_sender_ended_without_sending() -> None:
    own = state(count(0, num_received=((1, 2),)), in_="recv")
    assert stuck({0: own, 1: state(count(0, num_sent=((0, 1),)))}, {1}) == [0]
    assert stuck({0: own, 1: state(count(0, num_sent=((0, 2),)))}, {1}) == []


def test_sender_is_stuck_when_the_receiver_ended_without_receiving() -> None:
    own = state(count(0, num_sent=((1, 2),)), in_="send")
    assert stuck({0: own, 1: state(count(0, num_received=((0, 1),)))}, {1}) == [0]
    assert stuck({0: own, 1: state(count(0, num_received=((-1, 2),)))}, {1}) == []


def test_a_message_does_not_wait_for_collectives() -> None:
    own = state(count(9, num_received=((1, 2),)), in_="recv")
    assert stuck({0: own, 1: state(count(3)), 2: state(count(3))}, {2}) == []


def test_waiting_may_be_for_a_message() -> None:
    own = state(count(3, num_received=((1, 1),)), in_="wait")
    assert stuck({0: own, 1: state(count(3))}, {1}) == [0]


def test_receiver_from_any_rank_is_stuck_when_no_sender_is_left() -> None:
    own = state(count(0, num_received=((-1, 2),)), in_="recv")
    sent = state(count(0, num_sent=((0, 1),)))
    silent = state(count(0))
    assert stuck({0: own, 1: sent, 2: silent, 3: silent}, {1, 2}) == []
    assert stuck({0: own, 1: sent, 2: silent, 3: silent}, {1, 2, 3}) == [0]
    assert stuck({0: own, 1: sent, 2: sent, 3: silent}, {1, 2, 3}) == []


def test_ranks_that_do_not_wait_for_the_run_are_left_alone() -> None:
    states = {
        0: state(count(3), in_="all_reduce"),
        1: state(count(2)),
        2: state(count(3), in_="all_reduce"),
    }
    assert stuck(states, {1}, waiting={2}) == [2]
