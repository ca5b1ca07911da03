"""Operations that can never meet are found, and nothing else; said in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from cellmesh.controller.core.verdict import Verdict, find_verdict
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
    in_ = in_ or (waits[-1].name if waits else "")
    group = making[0] or (waits[-1].group if waits else "")
    where = (1, 7, 1, 1, "f", in_, "cpu", 0, group, waited_s if in_ else 0.0)
    return RankState(*where, counts=counts, in_flight=waits, making=making[1])


def waits(name: str, number: int, on: str = "0", peer: int = -1) -> tuple[InFlight, ...]:
    return (InFlight(on, name, number, peer),)


def verdict(
    states: Mapping[int, RankState], absent: Any = (), num: int = 0, dead: Any = ()
) -> Verdict | None:
    return find_verdict(states, absent, num or len(states), 1.0, dead)


def stuck(states: Mapping[int, RankState], **options: Any) -> Verdict:
    found = verdict(states, **options)
    assert found is not None
    return found


def in_one(rank_ops: Mapping[int, Begun]) -> dict[int, RankState]:
    return {
        rank: state(group("0", op.number, recent=(op,)), waits=waits(op.name, op.number))
        for rank, op in rank_ops.items()
    }


# ---- one number, and not one operation


DIFFER = [
    (
        [begun("all_reduce" if rank % 2 else "all_gather", 12, 4 << rank % 2) for rank in range(8)],
        "12th operation is all_gather of 4 float32 on ranks 0,2,4,6 and all_reduce of 8 float32 on "
        "ranks 1,3,5,7",
    ),
    (
        [begun(), begun(), begun(), begun(size=8)],
        "1st operation is all_reduce of 4 float32 on ranks 0-2 and all_reduce of 8 float32 on "
        "rank 3",
    ),
    (
        [begun(), begun(), begun(), begun(dtype="float64")],
        "1st operation is all_reduce of 4 float32 on ranks 0-2 and all_reduce of 4 float64 on "
        "rank 3",
    ),
    (
        [begun("broadcast", 2, root=rank % 2) for rank in range(4)],
        "2nd operation is broadcast of 4 float32 with rank 0 as its root on ranks 0,2 and "
        "broadcast of 4 float32 with rank 1 as its root on ranks 1,3",
    ),
]


@pytest.mark.parametrize(("ops", "words"), DIFFER)
def test_operations_that_differ_cannot_meet(ops: list[Begun], words: str) -> None:
    text = f"these cannot meet: on the default group the {words}"
    states = in_one(dict(enumerate(ops)))
    assert verdict(states) == Verdict(tuple(range(len(ops))), text)
    assert verdict({rank: one for rank, one in states.items() if ops[rank] == ops[0]}) is None
    brief = {rank: msgspec.structs.replace(one, waited_s=0.5) for rank, one in states.items()}
    assert verdict(brief) is None


def test_text_is_bounded() -> None:
    assert len(stuck(in_one({rank: begun(size=rank) for rank in range(400)})).text) < 2000


def test_what_has_met_although_it_differed_is_passed_over() -> None:
    old = {0: begun("all_gather"), 1: begun("all_gather_into_tensor"), 2: begun("all_gather")}
    states = {
        rank: state(group("0", 2, recent=(op, begun(number=2))), waits=waits("all_reduce", 2))
        for rank, op in old.items()
    }
    states[2] = state(group("0", 1, recent=(old[2],)))  # computes
    assert verdict(states) is None


# ---- ranks that wait for each other


def test_two_ranks_that_both_receive_first_are_stuck() -> None:
    states = {
        rank: state(
            group("0", 0, num_received=((1 - rank, 1),)), waits=waits("recv", 1, peer=1 - rank)
        )
        for rank in range(2)
    }
    assert verdict(states) == Verdict(
        (0, 1),
        "these cannot meet: rank 0 waits to receive from rank 1, which has not sent; rank 1 waits "
        "to receive from rank 0, which has not sent",
    )
    both = group("0", 0, num_received=((0, 1),), num_sent=((0, 1),))
    states[1] = state(both, waits=waits("recv", 1, peer=0))
    assert verdict(states) is None


def test_a_send_waits_for_its_receive() -> None:
    sends = state(group("0", 0, num_sent=((1, 1),)), waits=waits("send", 1, peer=1))
    reduces = state(group("0", 1, recent=(begun(),)), waits=waits("all_reduce", 1))
    text = stuck({0: sends, 1: reduces}).text
    assert "rank 0 waits to send to rank 1, which does not receive" in text
    for sender in (0, -1):
        receives = state(group("0", 1, num_received=((sender, 1),)), waits=waits("all_reduce", 1))
        assert verdict({0: sends, 1: receives}) is None


def test_a_receive_from_any_rank_is_stuck_if_all_others_are() -> None:
    anyone = state(group("0", 0, num_received=((-1, 1),)), waits=waits("recv_anysource", 0))
    reduces = state(group("0", 1), waits=waits("all_reduce", 1))
    found = stuck({0: anyone, 1: reduces, 2: reduces})
    assert found.stuck == (0, 1, 2)
    assert "rank 0 waits to receive from any rank, and none has sent" in found.text
    assert verdict({0: anyone, 1: reduces, 2: state(group("0", 0))}) is None
    sent = state(group("0", 1, num_sent=((0, 1),)), waits=waits("all_reduce", 1))
    assert verdict({0: anyone, 1: sent, 2: reduces}) is None


def test_an_operation_in_flight_that_may_end_keeps_its_rank_going() -> None:
    both = (*waits("all_reduce", 1, "dp"), *waits("all_reduce", 2, "tp"))
    states = {
        0: state(group("dp", 1), group("tp", 2), waits=both),
        1: state(group("dp", 1), group("tp", 1), waits=waits("all_reduce", 1, "dp")),
    }
    assert verdict(states) is None


def test_a_root_goes_on_once_one_has_begun_and_others_need_it() -> None:
    op, tp, late_tp = begun("broadcast", 1, root=0), group("tp", 1, (1, 2)), group("tp", 0, (1, 2))
    root = state(group("0", 1, recent=(op,)), waits=waits("broadcast", 1))
    joined = state(group("0", 1, recent=(op,)), tp, waits=waits("all_reduce", 1, "tp"))
    elsewhere = state(group("0", 0), tp, waits=waits("all_reduce", 1, "tp"))
    late = state(group("0", 0), late_tp, in_="new_group")
    assert verdict({0: root, 1: joined, 2: late}) is None
    assert verdict({0: root, 1: elsewhere, 2: late}) is not None
    inside = state(group("0", 1, recent=(op,)), waits=waits("broadcast", 1))
    assert verdict({0: late, 1: inside}) is not None
    assert verdict({0: root, 1: inside}) is None


def test_making_a_group_on_some_ranks_only_is_stuck_with_the_others() -> None:
    reduces = state(group("0", 1), waits=waits("all_reduce", 1))
    makes = state(group("0", 0), in_="new_group")
    found = stuck({0: reduces, 1: reduces, 2: makes})
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


def reducing(number: int = 3, on: str = "0", members: tuple[int, ...] = ()) -> RankState:
    return state(group(on, number, members), waits=waits("all_reduce", number, on))


def idle(number: int = 3, **messages: Any) -> RankState:
    return state(group("0", number, **messages))


def receiving(peer: int, number: int, name: str = "recv") -> RankState:
    count = group("0", 0, num_received=((peer, number),))
    return state(count, waits=waits(name, number, peer=peer))


AT_STORE = state(group("0", 1), in_="init_process_group")
MAKES = state(group("0", 1), in_="new_group", making=("b", (0, 1, 2)))
MADE, OTHER = (state(group("0", 1), group("b", 0, members)) for members in ((0, 1, 2), (1, 3)))
SENDS = state(group("0", 0, num_sent=((1, 2),)), waits=waits("send", 2, peer=1))
FROM_ANY = receiving(-1, 2, "recv_anysource")
SENT, SILENT = idle(0, num_sent=((0, 1),)), idle(0)
HAS_SENT = state(
    group("0", 1, num_sent=((1, 1),)), waits=(*waits("send", 1, peer=1), *waits("all_reduce", 1))
)
HAS_RECEIVED = idle(0, num_received=((0, 1),))
MAKES_LATER = msgspec.structs.replace(MAKES, in_flight=waits("all_reduce", 1))
ENDS = msgspec.structs.replace(reducing(), in_flight=())
AS_ROOT = state(group("0", 3, recent=(begun("broadcast", 3, root=0),)), waits=waits("broadcast", 3))

# The states of ranks, which of them have ended, and which are stuck; there are four ranks.
ABSENT: dict[str, tuple[dict[int, RankState], set[int], tuple[int, ...]]] = {
    "a rank ended without the collective": ({0: reducing(), 1: idle(2)}, {1}, (0,)),
    "a rank took part": ({0: reducing(), 1: idle()}, {1}, ()),
    "a rank still runs": ({0: reducing(), 1: idle(2)}, set(), ()),
    "one that a rank has not begun": ({0: reducing(), 1: idle(), 2: idle(2)}, {1, 2}, (0,)),
    "a broadcast that others have begun": ({0: AS_ROOT, 1: idle(), 2: idle(2)}, {2}, (0,)),
    "no member of the group": ({0: reducing(3, "a", (0, 1)), 2: SILENT}, {2}, ()),
    "a member of the group": ({0: reducing(3, "a", (0, 1)), 1: SILENT}, {1}, (0,)),
    "all are needed at a store": ({0: AT_STORE, 1: idle(1)}, {1}, (0,)),
    "a group that a member has not made": ({0: MAKES, 1: MADE, 2: idle(1)}, {1, 2}, (0,)),
    "a group of the same name": ({0: MAKES, 1: OTHER, 2: MADE}, {1, 2}, (0,)),
    "no member": ({0: MAKES, 1: MADE, 2: idle(1), 3: idle(1)}, {1, 3}, ()),
    "no answer of a living rank": ({0: reducing()}, {1}, ()),
    "a sender ended without sending": ({0: receiving(1, 2), 1: SENT}, {1}, (0,)),
    "a sender has sent": ({0: receiving(1, 1), 1: SENT}, {1}, ()),
    "a receiver ended": ({0: SENDS, 1: idle(0, num_received=((0, 1),))}, {1}, (0,)),
    "a message that was received is not waited for": ({0: HAS_SENT, 1: HAS_RECEIVED}, {1}, (0,)),
    "a group is made beside a collective": ({0: MAKES_LATER, 1: MADE, 2: idle(1)}, {1, 2}, (0,)),
    "its operation has just ended": ({0: ENDS, 1: MADE, 2: idle(1)}, {1, 2}, ()),
    "a sender is left": ({0: FROM_ANY, 1: SENT, 2: SILENT, 3: SILENT}, {1, 2}, ()),
    "no sender is left": ({0: FROM_ANY, 1: SENT, 2: SILENT, 3: SILENT}, {1, 2, 3}, (0,)),
}


@pytest.mark.parametrize(("states", "ended", "found"), ABSENT.values(), ids=ABSENT)
def test_ranks_that_wait_for_one_that_has_ended_are_stuck(
    states: Any, ended: set[int], found: tuple[int, ...]
) -> None:
    judged = verdict(states, absent=ended, num=4)
    assert (judged.stuck if judged is not None else ()) == found


def test_a_long_chain_of_ranks_hides_no_wait_for_one_that_has_ended() -> None:
    chain = {
        rank: receiving(rank + 1, 1) if rank < 60 else state(group("0", 0)) for rank in range(2, 61)
    }
    assert stuck({0: receiving(1, 1), 1: idle(0), **chain}, absent={1}).stuck == (0,)


def test_the_text_has_only_operations_that_cannot_end() -> None:
    text = stuck({0: HAS_SENT, 1: HAS_RECEIVED}, absent={1}).text
    assert text.endswith(
        ": rank 0 waits in the 1st operation on the default group (all_reduce), which rank 1 has "
        "ended without"
    )


def test_the_text_names_ranks_that_have_ended_or_died() -> None:
    text = stuck({0: reducing(), 1: idle(2)}, num=4, absent={1}, dead={2, 3}).text
    assert text.endswith(
        "(all_reduce), which rank 1 has ended without and ranks 2-3 have died without"
    )
    assert stuck({0: MAKES, 1: MADE}, num=4, absent={1}, dead={2}).stuck == (0,)
    assert verdict({0: reducing()}, num=2) is None, "it may have begun the operation"
