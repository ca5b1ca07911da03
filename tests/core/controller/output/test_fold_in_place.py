"""Folding what is no whole line: progress bars, displays, tracebacks, gaps."""

from __future__ import annotations

import dataclasses

import pytest

from cellmesh.controller.output.fold import HOLD_TRACE_S, Gap, Line, Rich, Trace
from cellmesh.wire.user_code import Skipped

from ....support.folded_reader import ALL, LONG_S, SHORT_S, Screen, as_text, display, failure

# ---- unfinished lines


def test_an_unfinished_line_is_shown_after_a_while_and_redrawn() -> None:
    screen = Screen((0,))
    screen.print(0, "loading")
    assert screen.text == []
    screen.wait(LONG_S)
    assert screen.text == ["[0] loading"]
    assert screen.has_unfinished_lines
    screen.print(0, " ...")
    assert screen.text == ["[0] loading ..."]
    screen.print(0, " done\n")
    assert screen.text == ["[0] loading ... done"]
    assert not screen.has_unfinished_lines


def test_a_line_that_is_finished_soon_is_never_shown_unfinished() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), "half")
    screen.wait(SHORT_S)
    screen.print((0, 1), " and half\n")
    screen.finish()
    assert screen.redraws == []
    assert screen.text == ["[0-1] half and half"]


def test_a_progress_bar_is_one_line_a_rank() -> None:
    screen = Screen((0, 1))
    for percent in range(0, 101, 10):
        screen.print(0, f"\r{percent}%")
        screen.print(1, f"\r{percent // 2}%")
        screen.wait(LONG_S)
    screen.print((0, 1), "\n")
    screen.finish()
    assert screen.text == ["[0] 100%", "[1] 50%"]
    assert len(screen.redraws) > 10


def test_equal_progress_is_one_line() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), "\r10%")
    screen.wait(LONG_S)
    screen.print((0, 1), "\r20%")
    assert screen.redraws[-1] == (((0, 1), "20%"),)


def test_progress_is_redrawn_in_place_while_lines_pass_by() -> None:
    screen = Screen((0, 1))
    screen.print(0, "\r10%", "stderr")
    screen.wait(LONG_S)
    screen.print(1, "line\n")
    screen.wait(LONG_S)
    screen.print(0, "\r20%", "stderr")
    assert screen.text == ["[0] 20%", "[1] line"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("10%\r20%\r30%\n", "30%"),
        ("plain\r\n", "plain"),
        ("twice\r\r\n", "twice"),
        ("\rfirst\n", "first"),
        ("gone\r\rlast\n", "last"),
        ("\r\n", ""),
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_a_carriage_return_rewrites_its_line(text: str, line: str, cut: int) -> None:
    screen = Screen((0,))
    screen.print(0, text[:cut]) if cut else None
    screen.print(0, text[cut:])
    screen.finish()
    assert screen.text == [f"[0] {line}"]


def test_one_bar_after_the_other_keeps_the_finished_one() -> None:
    # tqdm over epochs, one rank a little ahead of the other.
    screen = Screen((0, 1))
    screen.print((0, 1), "\repoch 1: 50%")
    screen.wait(LONG_S)
    screen.print(0, "\repoch 1: 100%\n")
    screen.print(0, "\repoch 2: 10%")
    screen.wait(LONG_S)
    screen.print(1, "\repoch 1: 100%\n")
    screen.print((0, 1), "\repoch 2: 100%\n")
    screen.finish()
    for rank in (0, 1):
        assert [
            as_text(item)
            for ranks, item in screen.shown
            if rank in ranks and "100%" in as_text(item)
        ] == ["epoch 1: 100%", "epoch 2: 100%"]


def test_a_line_after_a_finished_bar_stands_below_it() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), "\r50%")
    screen.wait(LONG_S)
    screen.print(0, "\r100%\nsaved\n")
    screen.wait(LONG_S)
    screen.print(1, "\r100%\nsaved\n")
    screen.finish()
    for rank in (0, 1):
        assert [as_text(item) for ranks, item in screen.shown if rank in ranks] == ["100%", "saved"]


def test_bars_that_end_together_stay_in_their_place() -> None:
    screen = Screen(ALL)
    for rank in ALL:
        screen.print(rank, "\r50%")
    screen.wait(LONG_S)
    for rank in ALL:
        screen.print(rank, "\r100%\n")
    screen.wait(LONG_S)
    screen.print(ALL, "saved\n")
    screen.finish()
    assert screen.text == ["[0-3] 100%", "[0-3] saved"]
    assert all(screen.redraws), "an empty place was left"


def test_a_display_ends_the_line_before_it() -> None:
    screen = Screen((0,))
    screen.print(0, "look: ")
    screen.say(0, display("picture"))
    screen.print(0, "and on\n")
    screen.finish()
    assert screen.text == ["[0] look: ", "[0] Rich", "[0] and on"]


def test_a_gap_ends_the_line_before_it() -> None:
    # What is hidden lies between the two pieces: they are no line.
    screen = Screen((0,))
    screen.print(0, "cut off he")
    screen.say(0, Skipped(1, 10, 1000))
    screen.print(0, "the last of many\n")
    screen.finish()
    assert screen.text == ["[0] cut off he", "[0] Gap", "[0] the last of many"]


# ---- displays, tracebacks, gaps


def test_equal_displays_are_shown_once_with_every_ranks_id() -> None:
    screen = Screen((0, 1, 2))
    screen.say(1, display("picture", display_id="b"))
    screen.say(0, display("picture", display_id="a"))
    screen.say(2, display("picture"))
    screen.finish()
    [block] = screen.blocks
    assert block.ranks == (0, 1, 2)
    assert block.display_ids == ("a", "b", "")
    assert block.item == Rich("display", b"picture")


def test_displays_of_another_kind_are_not_equal() -> None:
    screen = Screen((0, 1))
    screen.say(0, display("42", "display"))
    screen.say(1, display("42", "result"))
    screen.finish()
    assert [block.ranks for block in screen.blocks] == [(0,), (1,)]


def test_equal_tracebacks_are_shown_once() -> None:
    screen = Screen(ALL)
    screen.say((0, 1), failure())
    screen.say(3, failure())
    screen.say(2, failure("something else"))
    screen.finish()
    assert {(block.ranks, block.item) for block in screen.blocks} == {
        ((0, 1, 3), Trace("ValueError", "no", "Traceback: no")),
        ((2,), Trace("ValueError", "something else", "Traceback: something else")),
    }


def test_a_traceback_is_shown_while_others_run_on() -> None:
    screen = Screen((0, 1))
    screen.say(1, failure())
    screen.leave(1)
    screen.wait(HOLD_TRACE_S)
    assert screen.text == ["[1] Trace"]


def test_a_traceback_stands_below_what_its_rank_printed() -> None:
    screen = Screen((0, 1))
    screen.print(1, "before\nunfinished")
    screen.say(1, failure())
    screen.leave(1)
    screen.finish()
    assert screen.text == ["[1] before", "[1] unfinished", "[1] Trace"]


def test_equal_gaps_are_shown_once() -> None:
    screen = Screen((0, 1))
    screen.say((0, 1), Skipped(1, 10, 1000))
    screen.finish()
    assert [(block.ranks, block.item) for block in screen.blocks] == [((0, 1), Gap(10, 1000))]


def test_blocks_are_values() -> None:
    line = Line("stdout", "x")
    assert line == Line("stdout", "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        line.text = "y"  # type: ignore[misc]
