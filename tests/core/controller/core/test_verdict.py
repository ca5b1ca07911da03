"""Operations that can never meet are found, and nothing else; said in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from cellmesh.controller.core.verdict import Verdict, find_verdict
from cellmesh.controller.core.verdict_text import ordinal
from cellmesh.wire.groups import Begun, GroupCount, InFlight
from cellmesh.wire.status import RankState

Ops = tuple[Begun, ...]


def begun(name: str = "all_reduce", number: int = 1, size: int = 4, **more: Any) -> Begun:
    return Begun(number, name, size, more.get("dtype", "float32"), more.get("root", -1))


def group(
    name: str, number: int, ranks: tuple[int, ...] = (), recent: Ops = (), **messages: Any
) -> GroupCount:
    description = "default_pg" if name == "0" else f"mesh_{name.rstrip('0123456789')}"
    return GroupCount(name, ranks, number, **messages, description=description, recent=recent)


def state(
    *counts: GroupCount,
    waits: tuple[InFlight, ...] = (),
    in_: str = "",
    waited_s: float = 5.0,
    making: tuple[str, tuple[int, ...]] = ("", ()),
) -> RankState:
    in_ = in_ or (waits[0].name if waits else "")
    return RankState(
        1,
        7,
        1,
        1,
        "f",
        in_,
        "cpu",
        0,
        making[0],
        waited_s if in_ else 0.0,
        counts=counts,
        in_flight=waits,
        making=making[1],
    )


def waits(name: str, number: int, on: str = "0", peer: int = -1) -> tuple[InFlight, ...]:
    return (InFlight(on, name, number, peer),)


def verdict(
    states: Mapping[int, RankState], absent: Any = (), num: int = 0, dead: Any = ()
) -> Verdict | None:
    return find_verdict(states, absent, num or len(states), 1.0, dead)


def in_one(rank_ops: Mapping[int, Begun]) -> dict[int, RankState]:
    return {
        rank: state(group("0", op.number, recent=(op,)), waits=waits(op.name, op.number))
        for rank, op in rank_ops.items()
    }


# ---- one number, and not one operation


def test_operations_of_two_kinds_cannot_meet() -> None:
    kinds = {
        rank: begun("all_reduce" if rank % 2 else "all_gather", 12, 4 << rank % 2)
        for rank in range(8)
    }
    found = verdict(in_one(kinds))
    assert found == Verdict(
        tuple(range(8)),
        "these cannot meet: on the default group the 12th operation is all_gather on ranks 0,2,4,6 "
        "and all_reduce on ranks 1,3,5,7",
    )


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            begun(size=8),
            "on the default group the 1st operation, all_reduce, has 4 float32 on ranks 0-2 and "
            "8 float32 on rank 3",
        ),
        (
            begun(dtype="float64"),
            "on the default group the 1st operation, all_reduce, has 4 float32 on ranks 0-2 and "
            "4 float64 on rank 3",
        ),
    ],
)
def test_operations_of_two_sizes_or_dtypes_cannot_meet(odd: Begun, words: str) -> None:
    found = verdict(in_one({0: begun(), 1: begun(), 2: begun(), 3: odd}))
    assert found is not None
    assert found.text == f"these cannot meet: {words}"


def test_operations_with_two_roots_cannot_meet() -> None:
    ops = {rank: begun("broadcast", 2, root=rank % 2) for rank in range(4)}
    found = verdict(in_one(ops))
    assert found is not None
    assert found.text.endswith(
        "the 2nd operation, broadcast, has as its root rank 0 on ranks 0,2 and rank 1 on ranks 1,3"
    )


def test_the_rank_whose_own_part_has_ended_is_stuck_in_its_next_operation() -> None:
    first = begun("broadcast", 1, root=0)
    states = {
        0: state(group("0", 2, recent=(first, begun(number=2))), waits=waits("all_reduce", 2)),
        1: state(group("0", 1, recent=(begun(),)), waits=waits("all_reduce", 1)),
    }
    found = verdict(states)
    assert found is not None
    assert found.stuck == (0, 1)
    assert "1st operation is broadcast on rank 0 and all_reduce on rank 1" in found.text


def test_what_has_met_although_it_differed_is_passed_over() -> None:
    old = {0: begun("all_gather"), 1: begun("all_gather_into_tensor"), 2: begun("all_gather")}
    states = {
        rank: state(group("0", 2, recent=(op, begun(number=2))), waits=waits("all_reduce", 2))
        for rank, op in old.items()
    }
    states[2] = state(group("0", 1, recent=(old[2],)))  # computes
    assert verdict(states) is None


def test_ranks_in_one_operation_that_is_slow_are_left_alone() -> None:
    assert verdict(in_one({rank: begun() for rank in range(4)})) is None


def test_ranks_that_have_not_waited_long_are_left_alone() -> None:
    states = in_one({0: begun(), 1: begun("barrier")})
    brief = {
        rank: state(*one.counts, waits=one.in_flight, waited_s=0.5) for rank, one in states.items()
    }
    assert verdict(brief) is None


# ---- a circle


def left_out() -> dict[int, RankState]:
    """Rank 3 of a 2 x 2 mesh has left out the 5th of dp, which ranks 1 and 3 share."""
    world = group("0", 0)
    return {
        0: state(world, group("tp0", 4, (0, 1)), group("dp0", 5, (0, 2))),
        1: state(
            world,
            group("tp0", 3, (0, 1)),
            group("dp1", 5, (1, 3)),
            waits=waits("all_reduce", 5, "dp1"),
        ),
        2: state(
            world,
            group("tp1", 3, (2, 3)),
            group("dp0", 5, (0, 2)),
        ),
        3: state(
            world,
            group("tp1", 4, (2, 3)),
            group("dp1", 4, (1, 3)),
            waits=waits("all_gather", 4, "tp1"),
        ),
    }


def test_ranks_that_wait_in_a_circle_are_stuck() -> None:
    states = left_out()
    states[0] = state(*states[0].counts, waits=waits("all_reduce", 4, "tp0"))
    states[2] = state(group("0", 1), *states[2].counts[1:], waits=waits("barrier", 1))
    found = verdict(states)
    assert found is not None
    assert found.stuck == (0, 1, 2, 3)
    assert "rank 1 waits in the 5th operation on dp (all_reduce), which rank 3 has not begun" in (
        found.text
    )
    assert "rank 3 waits in the 4th operation on tp (all_gather), which rank 2 has not begun" in (
        found.text
    )


def test_ranks_are_not_stuck_while_one_they_need_computes() -> None:
    assert verdict(left_out()) is None  # rank 2 may come to tp's 4th


def test_an_operation_in_flight_that_may_end_keeps_its_rank_going() -> None:
    both = (*waits("all_reduce", 1, "dp"), *waits("all_reduce", 2, "tp"))
    states = {
        0: state(group("dp", 1), group("tp", 2), waits=both),
        1: state(group("dp", 1), group("tp", 1), waits=waits("all_reduce", 1, "dp")),
    }
    assert verdict(states) is None


def test_two_ranks_that_both_receive_first_are_stuck() -> None:
    states = {
        rank: state(
            group("0", 0, num_received=((1 - rank, 1),)), waits=waits("recv", 1, peer=1 - rank)
        )
        for rank in range(2)
    }
    found = verdict(states)
    assert found == Verdict(
        (0, 1),
        "these cannot meet: rank 0 waits to receive from rank 1, which has not sent; rank 1 waits "
        "to receive from rank 0, which has not sent",
    )
    states[1] = state(
        group("0", 0, num_received=((0, 1),), num_sent=((0, 1),)), waits=waits("recv", 1, peer=0)
    )
    assert verdict(states) is None


def test_a_send_waits_for_its_receive() -> None:
    sends = state(group("0", 0, num_sent=((1, 1),)), waits=waits("send", 1, peer=1))
    reduces = state(group("0", 1, recent=(begun(),)), waits=waits("all_reduce", 1))
    found = verdict({0: sends, 1: reduces})
    assert found is not None
    assert "rank 0 waits to send to rank 1, which does not receive" in found.text
    for sender in (0, -1):
        receives = state(group("0", 1, num_received=((sender, 1),)), waits=waits("all_reduce", 1))
        assert verdict({0: sends, 1: receives}) is None


def test_a_receive_from_any_rank_is_stuck_if_all_others_are() -> None:
    anyone = state(group("0", 0, num_received=((-1, 1),)), waits=waits("recv_anysource", 0))
    reduces = state(group("0", 1), waits=waits("all_reduce", 1))
    found = verdict({0: anyone, 1: reduces, 2: reduces})
    assert found is not None
    assert found.stuck == (0, 1, 2)
    assert "rank 0 waits to receive from any rank, and none has sent" in found.text
    assert verdict({0: anyone, 1: reduces, 2: state(group("0", 0))}) is None
    sent = state(group("0", 1, num_sent=((0, 1),)), waits=waits("all_reduce", 1))
    assert verdict({0: anyone, 1: sent, 2: reduces}) is None


@pytest.mark.parametrize(
    ("has_begun", "is_stuck"), [(frozenset({0, 2}), False), (frozenset({2}), True)]
)
def test_a_broadcast_needs_its_root(has_begun: frozenset[int], is_stuck: bool) -> None:
    op = begun("broadcast", 1, root=0)
    states = {
        rank: state(
            group("0", int(rank in has_begun), recent=(op,) if rank in has_begun else ()),
            group("tp", int(rank not in has_begun), (0, 1, 2)),
            waits=waits("broadcast", 1) if rank in has_begun else waits("all_reduce", 1, "tp"),
        )
        for rank in range(3)
    }
    assert (verdict(states) is not None) == is_stuck


def test_making_a_group_on_some_ranks_only_is_stuck_with_the_others() -> None:
    reduces = state(group("0", 1), waits=waits("all_reduce", 1))
    makes = state(group("0", 0), in_="new_group")
    found = verdict({0: reduces, 1: reduces, 2: makes})
    assert found is not None
    assert found.stuck == (0, 1, 2)
    assert "which rank 2 has not begun; rank 2 waits in new_group" in found.text
    assert verdict({0: makes, 1: makes}) is None
    assert verdict({0: reduces, 1: makes, 2: state(group("0", 0))}) is None


def test_rank_that_makes_a_group_which_all_others_have_made_goes_on() -> None:
    reduces = state(group("0", 1), group("5", 0, (0, 1)), waits=waits("all_reduce", 1))
    makes = state(group("0", 0), in_="new_group", making=("5", (0, 1)))
    assert verdict({0: reduces, 1: makes}) is None
    makes = state(group("0", 0), in_="new_group", making=("6", (0, 1)))
    assert verdict({0: reduces, 1: makes}) is not None


# ---- ranks that will not come


def test_who_waits_for_an_ended_rank_is_stuck_and_so_is_who_waits_for_that_rank() -> None:
    states = {
        0: state(group("0", 3), waits=waits("all_reduce", 3)),
        1: state(group("0", 3), waits=waits("all_reduce", 3)),
        2: state(group("0", 2)),
    }
    found = verdict(states, absent={2})
    assert found == Verdict(
        (0, 1),
        "these cannot meet: ranks 0-1 wait in the 3rd operation on the default group (all_reduce), "
        "and rank 2 has ended after 2",
    )


def test_a_dead_rank_is_named_as_dead() -> None:
    states = {0: state(group("0", 1), waits=waits("all_reduce", 1))}
    found = verdict(states, num=2, dead={1})
    assert found is not None
    assert found.text.endswith("(all_reduce), and rank 1 is dead")


def test_a_living_rank_without_an_answer_may_come() -> None:
    assert verdict({0: state(group("0", 1), waits=waits("all_reduce", 1))}, num=2) is None


# ---- words and cost


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th",
    ]  # fmt: skip


def scattered(num: int) -> dict[int, RankState]:
    """Ranks in pairs, each of which waits in its own number of the next pair's group."""
    return {
        rank: state(
            group("0", rank, recent=(begun(number=rank),)),
            group(f"p{rank // 2}", rank % 2, (rank & ~1, rank | 1)),
            waits=waits("all_reduce", rank + 1),
        )
        for rank in range(num)
    }


def mixed(num: int) -> dict[int, RankState]:
    return in_one({rank: begun(size=rank + 1) for rank in range(num)})


def messages(num: int) -> dict[int, RankState]:
    return {
        rank: state(
            group("0", 0, num_received=(((rank + 1) % num, 1),)),
            waits=waits("recv", 1, peer=(rank + 1) % num),
        )
        for rank in range(num)
    }


@pytest.mark.parametrize("make", [scattered, mixed, messages])
def test_time_and_text_grow_with_the_ranks_and_not_with_their_square(make: Any) -> None:
    def calls(num: int) -> int:
        states, number = make(num), 0

        def count(*_: Any) -> None:
            nonlocal number
            number += 1

        sys.setprofile(count)
        try:
            found = verdict(states)
        finally:
            sys.setprofile(None)
        assert found is not None
        assert len(found.text) < 2000
        return number

    assert calls(400) < 6 * calls(100)
