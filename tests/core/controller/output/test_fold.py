"""Folding: equal output is shown once, and no output waits long for its like."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cellmesh.controller.output.fold import (
    HOLD_DISPLAY_S,
    HOLD_RESULT_S,
    HOLD_S,
    HOLD_TRACE_S,
    Folder,
    Gap,
    Line,
    Rich,
    Trace,
)
from cellmesh.wire.user_code import Output, Skipped

from ....support.folded_reader import (
    ALL,
    LEAVES,
    LONG_S,
    SHORT_S,
    Screen,
    Step,
    as_text,
    display,
    failure,
)

BOTH = (0, 1)
RESULT = display("42", "result")
Shown = Sequence[str]


def screen_of(num_ranks: int, *steps: Step) -> Screen:
    return Screen(range(num_ranks)).play(*steps)


def own_lines(screen: Screen, rank: int) -> list[str]:
    return [as_text(item) for ranks, item in screen.shown if rank in ranks]


# ---- shown at once, or held


@pytest.mark.parametrize(
    ("num_ranks", "steps", "shown"),
    [
        (2, [(BOTH, "1\n2\n")], ["[0-1] 1", "[0-1] 2"]),
        (2, [(BOTH, "\n\na\n")], ["[0-1] ", "[0-1] ", "[0-1] a"]),
        (1, [(0, "mine\n")], ["[0] mine"]),
        (2, [(0, "step\n")], []),
        (2, [(0, "step\n"), (1, "step\n")], ["[0-1] step"]),
        (2, [(1, LEAVES), (0, "alone\n")], ["[0] alone"]),
        (2, [(0, "alone\n"), (1, LEAVES)], ["[0] alone"]),
        (2, [(0, "a\n"), HOLD_S * 0.6, (0, "b\n"), HOLD_S * 0.5], ["[0] a"]),
        (2, [(0, RESULT), (0, LEAVES), HOLD_RESULT_S * 0.8], []),
        (2, [(0, RESULT), (0, LEAVES), HOLD_RESULT_S * 1.1], ["[0] Rich"]),
        (2, [(0, RESULT), (0, LEAVES), (1, "on\n"), HOLD_S * 1.1], ["[0] Rich", "[1] on"]),
        (2, [(0, display("P")), HOLD_DISPLAY_S * 0.9], []),
        (2, [(0, display("P")), HOLD_DISPLAY_S * 1.1], ["[0] Rich"]),
        (2, [(1, failure()), (1, LEAVES), HOLD_TRACE_S * 0.9], []),
        (2, [(1, failure()), (1, LEAVES), HOLD_TRACE_S], ["[1] Trace"]),
        (
            4,
            [(r, s) for r in BOTH for s in (failure(), LEAVES)]
            + [(3, "a\n"), HOLD_S, ((2, 3), failure())],
            ["[3] a", "[0-3] Trace"],
        ),
    ],
)
def test_output_is_shown_once_it_need_not_be_held(
    num_ranks: int, steps: Sequence[Step], shown: Shown
) -> None:
    assert screen_of(num_ranks, *steps).text == shown


def test_a_line_that_others_do_not_print_is_held_and_then_shown() -> None:
    screen = screen_of(2, 5.0, (0, "mine\n"))
    assert screen.folder.deadline() == pytest.approx(5.0 + HOLD_S)
    screen.wait(HOLD_S * 0.9)
    assert screen.text == []
    screen.wait(HOLD_S * 0.2)
    assert screen.text == ["[0] mine"]


def test_empty_fold_has_no_deadline() -> None:
    assert Folder(BOTH).deadline() is None
    screen = screen_of(2, (BOTH, "step\n"))
    assert screen.folder.deadline() is None
    assert screen.folder.take(screen.now) == []


def test_output_after_the_end_is_shown_at_once() -> None:
    screen = screen_of(2, (BOTH, "in time\n"))
    screen.finish()
    screen.play((1, "a thread, late\n"), (BOTH, "both, late\n"))
    assert screen.text == ["[0-1] in time", "[1] a thread, late", "[0-1] both, late"]


# ---- equal lines, and lines that differ


@pytest.mark.parametrize(
    ("num_ranks", "steps", "shown"),
    [
        (4, [step for rank in ALL for step in ((rank, "step\n"), SHORT_S)], ["[0-3] step"]),
        (
            2,
            [(0, "one\ntwo\n"), *((1, text) for text in ("on", "e\nt", "wo", "\n"))],
            ["[0-1] one", "[0-1] two"],
        ),
        (2, [(0, "tick\n" * 3), (1, "tick\n" * 2), SHORT_S, (1, "tick\n")], ["[0-1] tick"] * 3),
        (
            4,
            [*((rank, f"I am {rank}\n") for rank in reversed(ALL)), LONG_S],
            [f"[{rank}] I am {rank}" for rank in ALL],
        ),
        (8, [(range(7), "ok\n"), (7, "nan!\n"), LONG_S], ["[0-6] ok", "[7] nan!"]),
        (
            4,
            [(rank, "b\nc\n" if rank == 2 else "a\nb\nc\n") for rank in ALL],
            ["[0-1,3] a", "[0-3] b", "[0-3] c"],
        ),
        (
            2,
            [(0, "".join(f"{n}\n" for n in range(100)) + "done\n"), (1, "done\n")],
            [*(f"[0] {n}" for n in range(100)), "[0-1] done"],
        ),
        (2, [(0, "a\nb\n"), (1, "b\na\n")], ["[0] a", "[0-1] b", "[1] a"]),
        (2, [(0, "end\n"), (0, LEAVES), SHORT_S, (1, "end\n"), (1, LEAVES)], ["[0-1] end"]),
        (2, [(BOTH, "half"), (BOTH, LEAVES)], ["[0-1] half"]),
        (
            4,
            [(2, "b\n"), (0, "a\n"), (3, "unfinished"), (1, display("P"))],
            ["[0] a", "[1] Rich", "[2] b", "[3] unfinished"],
        ),
        (
            1,
            [(0, "look: "), (0, display("P")), (0, "and on\n")],
            ["[0] look: ", "[0] Rich", "[0] and on"],
        ),
        (
            1,
            [(0, "cut off he"), (0, Skipped(1, 10, 1000)), (0, "the last\n")],
            ["[0] cut off he", "[0] Gap", "[0] the last"],
        ),
        (
            2,
            [(1, "before\nunfinished"), (1, failure()), (1, LEAVES)],
            ["[1] before", "[1] unfinished", "[1] Trace"],
        ),
    ],
)
def test_equal_output_is_folded(num_ranks: int, steps: Sequence[Step], shown: Shown) -> None:
    screen = screen_of(num_ranks, *steps)
    screen.finish()
    assert sorted(screen.text) == sorted(shown)
    assert [each for each in screen.text if "-" in each] == [each for each in shown if "-" in each]
    assert screen.folder.deadline() is None
    assert not screen.has_unfinished_lines


@pytest.mark.parametrize("odd", ALL)
def test_an_odd_line_does_not_unfold_what_follows(odd: int) -> None:
    others = [rank for rank in ALL if rank != odd]
    screen = screen_of(4, *((r, ("odd\n" if r == odd else "") + "1\n2\n") for r in ALL))
    screen.finish()
    assert screen.text == [f"[{odd}] odd", "[0-3] 1", "[0-3] 2"]
    # As ranks print: the first line after a pause is sent at once, those after it are gathered.
    screen = screen_of(4, (odd, "odd\n"), (others, "step\n"), SHORT_S, (odd, "step\n"))
    screen.finish()
    assert screen.text == [f"[{odd}] odd", "[0-3] step"]


@pytest.mark.parametrize("odd", ALL)
def test_an_odd_line_in_every_step_unfolds_none(odd: int) -> None:
    screen = Screen(ALL)
    for step in range(20):
        screen.play(*((r, f"{step}\n" + (f"odd {step}\n" if r == odd else "")) for r in ALL))
        screen.wait(LONG_S)
    screen.finish()
    lines = ((f"[0-3] {step}", f"[{odd}] odd {step}") for step in range(20))
    assert screen.text == [line for pair in lines for line in pair]


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
@example([({0, 1}, "a", LONG_S, set()), ({0}, "a\n", 0.0, set()), ({0}, "a\n", 0.0, set())])
def test_there_is_more_exactly_when_the_folder_says_so(prints: Sequence[Any]) -> None:
    folder, now = Folder(ALL), 0.0
    for ranks, text, pause, leaving in prints:
        folder.feed(tuple(sorted(ranks)), Output(1, "stdout", text), now)
        folder.leave(leaving, now)
        for moment in (now, now + pause):
            due = folder.deadline()
            assert bool(folder.take(moment)) == (due is not None and due <= moment)
        now += pause


# ---- unfinished lines


def test_an_unfinished_line_is_shown_after_a_while_and_redrawn() -> None:
    screen = screen_of(1, (0, "loading"))
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
    screen = screen_of(2, (BOTH, "half"), SHORT_S, (BOTH, " and half\n"))
    screen.finish()
    assert screen.redraws == []
    assert screen.text == ["[0-1] half and half"]


def test_a_progress_bar_is_one_line_a_rank() -> None:
    screen = Screen(BOTH)
    for percent in range(0, 101, 10):
        screen.play((0, f"\r{percent}%"), (1, f"\r{percent // 2}%"), LONG_S)
    screen.print(BOTH, "\n")
    screen.finish()
    assert screen.text == ["[0] 100%", "[1] 50%"]
    assert len(screen.redraws) > 10


def test_equal_progress_is_one_line() -> None:
    screen = screen_of(2, (BOTH, "\r10%"), LONG_S, (BOTH, "\r20%"))
    assert screen.redraws[-1] == ((BOTH, "20%"),)


def test_progress_is_redrawn_in_place_while_lines_pass_by() -> None:
    screen = Screen(BOTH)
    screen.print(0, "\r10%", "stderr")
    screen.play(LONG_S, (1, "line\n"), LONG_S)
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
    screen = screen_of(1, (0, text[:cut]), (0, text[cut:]))
    screen.finish()
    assert screen.text == [f"[0] {line}"]


def test_output_after_a_finished_bar_stands_below_it() -> None:
    # As of tqdm over epochs, where one rank is a little ahead of the other.
    then = "\r100%\nsaved\n\repoch 2: 100%\n"
    screen = screen_of(2, (BOTH, "\r50%"), LONG_S, (0, then), LONG_S, (1, then))
    screen.finish()
    for rank in BOTH:
        assert own_lines(screen, rank) == ["100%", "saved", "epoch 2: 100%"]


def test_one_bar_after_the_other_keeps_the_finished_one() -> None:
    done, second = "\repoch 1: 100%\n", "\repoch 2: 10%"
    screen = screen_of(2, (BOTH, "\repoch 1: 50%"), LONG_S, (0, done), (0, second), LONG_S)
    screen.play((1, done), (BOTH, "\repoch 2: 100%\n"))
    screen.finish()
    for rank in BOTH:
        ended = [line for line in own_lines(screen, rank) if "100%" in line]
        assert ended == ["epoch 1: 100%", "epoch 2: 100%"]


def test_bars_that_end_together_stay_in_their_place() -> None:
    half, whole = ([(rank, f"\r{text}") for rank in ALL] for text in ("50%", "100%\n"))
    screen = screen_of(4, *half, LONG_S, *whole, LONG_S, (ALL, "saved\n"))
    screen.finish()
    assert screen.text == ["[0-3] 100%", "[0-3] saved"]
    assert all(screen.redraws), "an empty place was left"


# ---- blocks


@pytest.mark.parametrize(
    ("said", "blocks"),
    [
        (
            [(0, Output(1, "stdout", "x\n")), (1, Output(1, "stderr", "x\n"))],
            [((0,), Line("stdout", "x")), ((1,), Line("stderr", "x"))],
        ),
        (
            [(0, display("42", "display")), (1, display("42", "result"))],
            [((0,), Rich("display", b"42")), ((1,), Rich("result", b"42"))],
        ),
        (
            [(BOTH, failure()), (3, failure()), (2, failure("else"))],
            [
                ((0, 1, 3), Trace("ValueError", "no", "Traceback: no")),
                ((2,), Trace("ValueError", "else", "Traceback: else")),
            ],
        ),
        ([(BOTH, Skipped(1, 10, 1000))], [(BOTH, Gap(10, 1000))]),
    ],
    ids=["streams", "kinds of displays", "tracebacks", "gaps"],
)
def test_equal_items_are_one_block(said: Sequence[Step], blocks: Sequence[Any]) -> None:
    screen = screen_of(4, *said)
    screen.finish()
    assert sorted((block.ranks, block.item) for block in screen.blocks) == blocks


def test_equal_displays_are_shown_once_with_every_ranks_id() -> None:
    shown = ((1, display("P", display_id="b")), (0, display("P", display_id="a")))
    screen = screen_of(3, *shown, (2, display("P")))
    screen.finish()
    [block] = screen.blocks
    assert (block.ranks, block.display_ids) == ((0, 1, 2), ("a", "b", ""))
    assert block.item == Rich("display", b"P")


def test_blocks_are_values() -> None:
    line = Line("stdout", "x")
    assert line == Line("stdout", "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        line.text = "y"  # type: ignore[misc]
