"""Joining what ranks say alike: nothing is lost, and each rank's order is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.messages import Done, Failed, Pickled
from cellmesh.wire.verbs import Bar, Output, Skipped
from cellmesh.workers.agent.merger import HOLD_BARS_S, HOLD_S, Merger, find_answers

LATER = 1e6


def say(
    merger: Merger, rank: int, *verbs: Any, now: float = 0.0, buffers: tuple[bytes, ...] = ()
) -> None:
    for verb in verbs:
        merger.add(rank, Parcel(verb, buffers), now)


def expecting(run: int, num_ranks: int) -> Merger:
    merger = Merger()
    merger.expect(run, num_ranks)
    return merger


def taken(merger: Merger, now: float = LATER) -> list[tuple[tuple[int, ...], Any]]:
    return [(ranked.ranks, ranked.verb) for ranked, _ in merger.take(now)]


def out(text: str, run: int = 1) -> Output:
    return Output(run, "stdout", text)


def failed(run: int = 1) -> Failed:
    return Failed(run, "ValueError", "no", "Traceback", 3)


# ---- joining


# ---- when


def test_message_waits_briefly_for_equal_ones_of_other_ranks() -> None:
    merger = Merger()
    say(merger, 0, out("x\n"), now=5.0)
    say(merger, 1, out("y\n"), now=5.002)
    assert merger.deadline() == 5.0 + HOLD_S
    assert merger.take(5.0) == []
    assert len(merger.take(5.0 + HOLD_S)) == 2
    assert merger.deadline() is None


def test_once_all_have_answered_nothing_waits() -> None:
    merger = expecting(1, 2)
    say(merger, 0, Done(1))
    assert merger.take(0.0) == []
    say(merger, 1, Done(1))
    assert taken(merger, 0.0) == [((0, 1), Done(1))]


@pytest.mark.parametrize("at_once", [False, True])
def test_no_answer_waits_if_the_last_one_equals_an_earlier_one(at_once: bool) -> None:
    merger, done = expecting(1, 3), Parcel(Done(1))
    answers = find_answers(bytes(encode([done])[0]), [done])
    assert answers is not None
    value = Done(1, Pickled(b"value"))
    for rank in (0, 1, 2):
        if rank == 1:
            say(merger, rank, value)
        elif at_once:
            merger.add_answers(rank, answers, 0.0)
        else:
            say(merger, rank, Done(1))
    assert taken(merger, 0.0) == [((0, 2), Done(1)), ((1,), value)]


def test_a_failure_does_not_wait() -> None:
    merger = expecting(1, 4)
    say(merger, 0, failed())
    assert taken(merger, 0.0) == [((0,), failed())]


def test_runs_that_have_not_ended_on_all_ranks_wait_for_their_last_answers() -> None:
    merger = expecting(1, 2)
    merger.expect(2, 2)
    say(merger, 0, Done(1), out("x\n"), Done(2), now=5.0)
    say(merger, 1, Done(1), now=5.001)
    assert taken(merger, 5.001) == [((0, 1), Done(1))]
    assert merger.deadline() == 5.0 + HOLD_S
    say(merger, 1, out("x\n"), now=5.002)
    assert taken(merger, 5.002) == []
    say(merger, 1, Done(2), now=5.003)
    assert taken(merger, 5.003) == [((0, 1), out("x\n")), ((0, 1), Done(2))]


def test_ranks_that_will_never_answer_are_not_waited_for() -> None:
    merger = expecting(1, 3)
    for rank in (0, 1):
        say(merger, rank, out("x\n"), Done(1))
    assert merger.take(0.0) == []
    merger.forget(1)
    assert taken(merger, 0.0) == [((0, 1), out("x\n")), ((0, 1), Done(1))]


# ---- always

VERBS = st.sampled_from(
    [
        *(out("a\n"), out("b\n"), out("a\n", 2), Skipped(1, 1, 1)),
        *(Done(1), Done(2), failed(), Done(1, Pickled(b"v"))),
    ]
)
SAID = st.lists(
    st.tuples(
        st.integers(0, 3), VERBS, st.booleans(), st.sampled_from([0.0, HOLD_S / 2, HOLD_S * 2])
    ),
    max_size=40,
)


@given(SAID)
def test_each_rank_is_heard_in_full_and_in_order(said: Sequence[Any]) -> None:
    merger, now, heard = expecting(1, 4), 0.0, []
    wanted: dict[int, list[Any]] = {rank: [] for rank in range(4)}
    for index, (rank, verb, has_buffer, pause) in enumerate(said):
        buffers: tuple[bytes, ...] = ()
        if has_buffer and isinstance(verb, Done):
            verb, buffers = Done(verb.run, Pickled(b"v", 1)), (b"%d" % index,)
        say(merger, rank, verb, now=now, buffers=buffers)
        wanted[rank].append((verb, buffers))
        now += pause
        heard += merger.take(now)
    heard += merger.take(LATER)
    for rank in range(4):
        got = [(ranked.verb, buffers) for ranked, buffers in heard if rank in ranked.ranks]
        assert got == wanted[rank]


@given(SAID)
def test_messages_are_taken_at_their_deadline_and_none_later(said: Sequence[Any]) -> None:
    merger, now = Merger(), 0.0
    for rank, verb, _, pause in said:
        say(merger, rank, verb, now=now)
        due = merger.deadline()
        assert due is not None
        assert due <= now + HOLD_S
        now += pause
        if due <= now:
            assert merger.take(now)
            assert merger.deadline() is None


@given(st.lists(VERBS, max_size=8), st.integers(1, 6), st.data())
def test_ranks_that_say_the_same_are_heard_as_one(
    script: Sequence[Any], num_ranks: int, data: st.DataObject
) -> None:
    different = [verb for index, verb in enumerate(script) if verb not in script[:index]]
    merger = Merger()
    left = {rank: list(different) for rank in range(num_ranks)}
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank, verbs in left.items() if verbs]))
        say(merger, rank, left[rank].pop(0))
    assert taken(merger) == [(tuple(range(num_ranks)), verb) for verb in different]


# Of one rank: its next answers together, an output, or a bar's state; or time for a `take`.
TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 4, 4, "print", "bar", "take"])),
    max_size=60,
)


@given(TURNS, st.integers(1, 4))
@example([(0, "print"), (0, 4), (1, 4), (1, "print")], 4)
def test_answers_added_together_are_taken_as_those_added_singly(
    turns: Sequence[tuple[int, Any]], num_expected: int
) -> None:
    merger, single = Merger(), Merger()
    for run in range(300):
        merger.expect(run, num_expected)
        single.expect(run, num_expected)
    said: dict[str, list[Any]] = {"together": [], "singly": []}
    next_run = dict.fromkeys(range(4), 0)
    for rank, turn in [*turns, (0, "take")]:
        if turn == "take":
            both = said["together"], said["singly"]
            for each, heard in zip((merger, single), both, strict=True):
                heard.append(each.take(0.0))
            assert bool(both[0][-1]) == bool(both[1][-1])
            assert merger.deadline() == single.deadline()
        elif turn in ("print", "bar"):
            verb = out("x\n") if turn == "print" else bar(next_run[rank])
            say(merger, rank, verb)
            say(single, rank, verb)
        else:
            parcels = [Parcel(Done(next_run[rank] + number)) for number in range(turn)]
            next_run[rank] += turn
            answers = find_answers(encode(parcels)[0], parcels)
            assert answers is not None
            merger.add_answers(rank, answers, 0.0)
            say(single, rank, *(parcel.verb for parcel in parcels))
    for each, heard in zip((merger, single), said.values(), strict=True):
        heard.append(each.take(LATER))
    for rank in range(4):
        together, singly = (
            [r.verb for message in heard for r, _ in message if rank in r.ranks]
            for heard in said.values()
        )
        assert together == singly


def test_equal_answers_of_ranks_are_merged_although_one_has_sent_them_apart() -> None:
    merger, parcels = Merger(), [Parcel(Done(run)) for run in range(3)]
    answers = find_answers(b"header", parcels)
    assert answers is not None
    merger.add_answers(0, answers, 0.0)
    say(merger, 1, *(parcel.verb for parcel in parcels))
    merger.add_answers(2, answers, 0.0)
    assert taken(merger) == [((0, 1, 2), Done(run)) for run in range(3)]


@pytest.mark.parametrize("last", [failed(), out("x\n"), Done(2, Pickled(b"v"))])
def test_only_answers_without_values_are_plain(last: Any) -> None:
    assert find_answers(b"", [Parcel(Done(1)), Parcel(last)]) is None
    assert find_answers(b"", []) is None


# ---- progress bars


def bar(done: float, state: Any = "open", number: int = 1, run: int = 1) -> Bar:
    return Bar(run, number, "t", done, 10.0, 1.0, state=state)


def test_bars_travel_ten_times_a_second_whatever_the_number_of_ranks() -> None:
    merger = Merger()
    num_messages = 0
    for step in range(1000):
        now, state = 1 + step / 1000, "done" if step % 50 == 49 else "open"
        for rank in range(64):  # each opens and ends bars, too
            say(merger, rank, bar(step % 50, state, number=step // 50), now=now)
        num_messages += bool(taken(merger, now))
    assert 5 < num_messages <= 1 / HOLD_BARS_S + 1
    assert len(taken(merger)) <= 64 * 6


def test_of_a_bar_the_last_word_travels() -> None:
    merger = Merger()
    say(merger, 0, bar(0), bar(5), bar(1, number=2), bar(10, "done"))
    assert taken(merger) == [((0,), bar(10, "done")), ((0,), bar(1, number=2))]
    assert taken(merger) == []


def test_progress_of_bars_precedes_the_next_message_of_their_rank() -> None:
    merger = Merger()
    say(merger, 0, bar(5))
    say(merger, 1, bar(7))
    say(merger, 0, out("below"))
    say(merger, 0, bar(6))
    bars = [((0,), bar(5)), ((1,), bar(7)), ((0,), out("below")), ((0,), bar(6))]
    assert taken(merger, 2 * HOLD_S) == bars
    assert merger.deadline() is None
