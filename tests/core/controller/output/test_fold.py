"""Folding: equal lines are shown once, and nobody waits long for those that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.output.fold import (
    HOLD_DISPLAY_S,
    HOLD_RESULT_S,
    HOLD_S,
    HOLD_TRACE_S,
    Block,
    Folder,
    Line,
    Rich,
)
from cellmesh.wire.user_code import Display, Output

from ....support.folded_reader import ALL, LONG_S, SHORT_S, Screen, display, failure

# ---- equal lines


def test_line_of_all_ranks_is_shown_once_and_at_once() -> None:
    screen = Screen(ALL)
    screen.print(ALL, "step 1\nstep 2\n")
    assert screen.text == ["[0-3] step 1", "[0-3] step 2"]


def test_equal_lines_of_ranks_in_turn_are_shown_once() -> None:
    screen = Screen(ALL)
    for rank in ALL:
        screen.print(rank, "step\n")
        screen.wait(SHORT_S)
    screen.wait(LONG_S)
    assert screen.text == ["[0-3] step"]


def test_equal_lines_in_different_pieces_are_shown_once() -> None:
    screen = Screen((0, 1))
    screen.print(0, "one\ntwo\nthree\n")
    for piece in ("on", "e\nt", "wo", "\nthree", "\n"):
        screen.print(1, piece)
    screen.finish()
    assert screen.text == ["[0-1] one", "[0-1] two", "[0-1] three"]


def test_an_equal_line_of_all_ranks_waits_for_nothing() -> None:
    screen = Screen((0, 1))
    screen.print(0, "step\n")
    assert screen.text == []
    screen.print(1, "step\n")
    assert screen.text == ["[0-1] step"]


def test_output_of_a_single_rank_is_not_held() -> None:
    screen = Screen((2,))
    screen.print(2, "mine\n")
    assert screen.text == ["[2] mine"]


def test_empty_lines_are_lines() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), "\n\na\n")
    assert screen.text == ["[0-1] ", "[0-1] ", "[0-1] a"]


def test_the_same_text_on_another_stream_is_another_line() -> None:
    screen = Screen((0, 1))
    screen.print(0, "text\n", "stdout")
    screen.print(1, "text\n", "stderr")
    screen.finish()
    assert [(block.ranks, block.item) for block in screen.blocks] == [
        ((0,), Line("stdout", "text")),
        ((1,), Line("stderr", "text")),
    ]


def test_lines_repeated_by_each_rank_fold_one_by_one() -> None:
    screen = Screen((0, 1))
    screen.print(0, "tick\ntick\ntick\n")
    screen.print(1, "tick\ntick\n")
    screen.wait(SHORT_S)
    screen.print(1, "tick\n")
    screen.finish()
    assert screen.text == ["[0-1] tick"] * 3


# ---- lines that differ


def test_lines_that_differ_are_shown_by_rank() -> None:
    screen = Screen(ALL)
    for rank in reversed(ALL):
        screen.print(rank, f"I am {rank}\n")
    screen.wait(LONG_S)
    assert screen.text == [f"[{rank}] I am {rank}" for rank in ALL]


def test_ranks_that_agree_are_grouped() -> None:
    screen = Screen(range(8))
    screen.print(range(7), "ok\n")
    screen.print(7, "nan!\n")
    screen.wait(LONG_S)
    assert sorted(screen.text) == ["[0-6] ok", "[7] nan!"]


@pytest.mark.parametrize("odd", ALL)
def test_an_odd_line_does_not_unfold_what_follows(odd: int) -> None:
    screen = Screen(ALL)
    for rank in ALL:
        screen.print(rank, ("warning\n" if rank == odd else "") + "step 1\nstep 2\n")
    screen.finish()
    assert screen.text == [f"[{odd}] warning", "[0-3] step 1", "[0-3] step 2"]


@pytest.mark.parametrize("odd", ALL)
def test_odd_first_line_does_not_unfold_later_lines(odd: int) -> None:
    # As ranks print: the first line after a pause is sent at once, those after it are gathered.
    screen = Screen(ALL)
    screen.print(odd, "warning\n")
    screen.print([rank for rank in ALL if rank != odd], "step\n")
    screen.wait(SHORT_S)
    screen.print(odd, "step\n")
    screen.finish()
    assert screen.text == [f"[{odd}] warning", "[0-3] step"]


@pytest.mark.parametrize("odd", ALL)
def test_an_odd_line_in_every_step_unfolds_none(odd: int) -> None:
    screen = Screen(ALL)
    for step in range(20):
        for rank in ALL:
            screen.print(rank, f"step {step}\n" + (f"extra {step}\n" if rank == odd else ""))
        screen.wait(LONG_S)
    screen.finish()
    assert screen.text == [
        line for s in range(20) for line in (f"[0-3] step {s}", f"[{odd}] extra {s}")
    ]


def test_a_rank_that_misses_a_line_does_not_unfold_what_follows() -> None:
    screen = Screen(ALL)
    for rank in ALL:
        screen.print(rank, ("a\n" if rank != 2 else "") + "b\nc\n")
    screen.finish()
    assert screen.text == ["[0-1,3] a", "[0-3] b", "[0-3] c"]


def test_many_odd_lines_do_not_unfold_what_follows() -> None:
    screen = Screen((0, 1))
    screen.print(0, "".join(f"detail {n}\n" for n in range(100)) + "done\n")
    screen.print(1, "done\n")
    screen.finish()
    assert screen.text[-1] == "[0-1] done"
    assert len(screen.text) == 101


def test_lines_in_another_order_are_all_shown() -> None:
    screen = Screen((0, 1))
    screen.print(0, "a\nb\n")
    screen.print(1, "b\na\n")
    screen.finish()
    assert screen.text == ["[0] a", "[0-1] b", "[1] a"]


# ---- holding, and for how long


def test_a_line_that_others_do_not_print_is_held_and_then_shown() -> None:
    screen = Screen((0, 1))
    screen.wait(5.0)
    screen.print(0, "mine\n")
    assert screen.text == []
    assert screen.folder.deadline() == pytest.approx(5.0 + HOLD_S)
    screen.wait(HOLD_S * 0.9)
    assert screen.text == []
    screen.wait(HOLD_S * 0.2)
    assert screen.text == ["[0] mine"]


def test_empty_fold_has_no_deadline() -> None:
    screen = Screen((0, 1))
    assert screen.folder.deadline() is None
    screen.print((0, 1), "step\n")
    assert screen.folder.deadline() is None
    assert screen.folder.take(screen.now) == []


def test_line_is_held_from_its_arrival() -> None:
    screen = Screen((0, 1))
    screen.print(0, "first\n")
    screen.wait(HOLD_S * 0.6)
    screen.print(0, "second\n")
    screen.wait(HOLD_S * 0.5)
    assert screen.text == ["[0] first"]
    screen.print(1, "second\n")
    screen.wait(LONG_S)
    assert screen.text == ["[0] first", "[0-1] second"]


def test_a_result_waits_longer_for_its_like() -> None:
    screen = Screen((0, 1))
    last = display("42", "result")
    screen.say(0, last)
    screen.leave(0)
    screen.wait(HOLD_RESULT_S * 0.8)
    assert screen.text == []
    screen.say(1, last)
    screen.leave(1)
    screen.finish()
    assert [block.ranks for block in screen.blocks] == [(0, 1)]
    assert isinstance(screen.blocks[0].item, Rich)


def test_a_result_does_not_wait_for_ever() -> None:
    screen = Screen((0, 1))
    screen.say(0, display("42", "result"))
    screen.leave(0)
    screen.wait(HOLD_RESULT_S * 1.1)
    assert [block.ranks for block in screen.blocks] == [(0,)]


def test_a_held_result_does_not_hold_up_what_others_print() -> None:
    screen = Screen((0, 1))
    screen.say(0, display("42", "result"))
    screen.leave(0)
    screen.print(1, "still working\n")
    screen.wait(LONG_S)
    screen.print(1, "and on\n")
    screen.wait(LONG_S)
    assert {"[1] still working", "[1] and on"} <= set(screen.text)


PRINTS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(ALL), min_size=1),
        st.sampled_from(["a\n", "b\n", "a", "\r", "50%\r", "c\nd\n"]),
        st.sampled_from([0.0, SHORT_S, HOLD_S * 0.6, LONG_S]),
        st.sets(st.sampled_from(ALL), max_size=1),
    ),
    max_size=12,
)


@given(PRINTS)
def test_there_is_more_exactly_when_the_folder_says_so(prints: Sequence[Any]) -> None:
    folder, now = Folder(ALL), 0.0
    for ranks, text, pause, leaving in prints:
        folder.feed(tuple(sorted(ranks)), Output(1, "stdout", text), now)
        folder.leave(leaving, now)
        for moment in (now, now + pause):
            due = folder.deadline()
            more = folder.take(moment)
            assert bool(more) == (due is not None and due <= moment)
        now += pause


# ---- ranks that leave


def test_fold_does_not_wait_for_ranks_that_have_ended() -> None:
    screen = Screen((0, 1))
    screen.leave(1)
    screen.print(0, "alone\n")
    assert screen.text == ["[0] alone"]


def test_output_held_for_an_ended_rank_is_shown() -> None:
    screen = Screen((0, 1))
    screen.print(0, "alone\n")
    assert screen.text == []
    screen.leave(1)
    assert screen.text == ["[0] alone"]


def test_the_last_lines_of_a_rank_that_leaves_fold_with_those_of_others() -> None:
    screen = Screen((0, 1))
    screen.print(0, "end\n")
    screen.leave(0)
    screen.wait(SHORT_S)
    screen.print(1, "end\n")
    screen.leave(1)
    screen.finish()
    assert screen.text == ["[0-1] end"]


def test_a_line_without_newline_ends_with_its_rank() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), "no newline")
    screen.leave(0, 1)
    screen.finish()
    assert screen.text == ["[0-1] no newline"]
    assert not screen.has_unfinished_lines


def test_output_after_the_end_is_shown_at_once() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), "in time\n")
    screen.finish()
    screen.print(1, "a thread, late\n")
    screen.print((0, 1), "both, late\n")
    assert screen.text == ["[0-1] in time", "[1] a thread, late", "[0-1] both, late"]


def test_the_end_holds_nothing_back() -> None:
    screen = Screen(ALL)
    screen.print(2, "b\n")
    screen.print(0, "a\n")
    screen.print(3, "unfinished")
    screen.say(1, display("picture"))
    screen.finish()
    assert sorted(screen.text) == ["[0] a", "[1] Rich", "[2] b", "[3] unfinished"]
    assert screen.folder.deadline() is None


def test_a_display_waits_longer_for_its_like_than_a_line() -> None:
    folder = Folder((0, 1))
    folder.feed((0,), Display(1, "display", b'{"data": {}}'), 0.0)
    assert folder.take(HOLD_DISPLAY_S * 0.9) == []
    folder.feed((1,), Display(1, "display", b'{"data": {}}'), HOLD_DISPLAY_S * 0.9)
    [block] = folder.take(HOLD_DISPLAY_S * 0.9)
    assert isinstance(block, Block)
    assert block.ranks == (0, 1)
    folder.feed((0,), Display(1, "display", b'{"data": {}}'), 1.0)
    [alone] = folder.take(1.0 + HOLD_DISPLAY_S)
    assert isinstance(alone, Block)
    assert alone.ranks == (0,)


def test_exceptions_wait_for_their_like_until_all_ranks_have_ended() -> None:
    screen = Screen((0, 1, 2, 3))
    for rank in (0, 1):
        screen.say(rank, failure())
        screen.leave(rank)
        screen.wait(HOLD_TRACE_S / 4)
    screen.print(3, "a line of another rank\n")
    screen.wait(HOLD_S)
    assert screen.text == ["[3] a line of another rank"]
    screen.say((2, 3), failure())
    assert screen.text[1:] == ["[0-3] Trace"]
