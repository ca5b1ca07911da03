"""Folding: equal lines are shown once, and every line of every rank is shown, in its order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellmesh.controller.fold import HOLD_RESULT_S, HOLD_S, Folder, Gap, Line, Rich, Trace
from cellmesh.wire.messages import Display, Failed, Output, Skipped

from .screen import Screen, as_text

ALL = (0, 1, 2, 3)
SHORT_S = HOLD_S / 10
LONG_S = HOLD_S * 2


def display(text: str, kind: Any = "display", display_id: str = "") -> Display:
    return Display(1, kind, text.encode(), display_id)


def failure(text: str = "no") -> Failed:
    return Failed(1, "ValueError", text, f"Traceback: {text}", 4)


# ---- equal lines


def test_what_all_print_at_once_is_shown_once_and_at_once() -> None:
    screen = Screen(ALL)
    screen.print(ALL, "step 1\nstep 2\n")
    assert screen.text == ["[0-3] step 1", "[0-3] step 2"]


def test_equal_lines_that_come_one_rank_after_the_other_are_shown_once() -> None:
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


def test_one_rank_alone_waits_for_nobody() -> None:
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
def test_an_odd_line_that_comes_first_does_not_unfold_what_comes_a_moment_later(odd: int) -> None:
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
    assert screen.text == [line for s in range(20) for line in (f"[0-3] step {s}", f"[{odd}] extra {s}")]


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


def test_nothing_is_due_where_nothing_came() -> None:
    screen = Screen((0, 1))
    assert screen.folder.deadline() is None
    screen.print((0, 1), "step\n")
    assert screen.folder.deadline() is None
    assert screen.folder.take(screen.now) == []


def test_each_line_is_held_from_when_it_came() -> None:
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
    screen.say(0, display("42", "result"))
    screen.leave(0)
    screen.wait(HOLD_RESULT_S * 0.8)
    assert screen.text == []
    screen.say(1, display("42", "result"))
    screen.leave(1)
    screen.finish()
    assert [(block.ranks, block.item) for block in screen.blocks] == [((0, 1), Rich("result", b"42"))]


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


def test_nobody_waits_for_ranks_that_have_left() -> None:
    screen = Screen((0, 1))
    screen.leave(1)
    screen.print(0, "alone\n")
    assert screen.text == ["[0] alone"]


def test_what_waited_only_for_a_rank_that_leaves_is_shown() -> None:
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


def test_what_comes_after_the_end_is_shown_at_once() -> None:
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
            as_text(item) for ranks, item in screen.shown if rank in ranks and "100%" in as_text(item)
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
    screen.wait(HOLD_S)
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


# ---- everything, once, in order

WHOLE = ["a\n", "b\n", "c\n", "a\nb\n", "10%\r20%\n", "c\r\n", "\n"]
PIECES = ["a", "b", "\r", "\n", "a\n", "\r10%", "\r20%\n", "x\ny"]
PAUSES = st.sampled_from([0.0, SHORT_S, HOLD_S * 0.6, LONG_S, LONG_S, HOLD_RESULT_S * 2])


def scripts(texts: Sequence[str]) -> st.SearchStrategy[list[list[Any]]]:
    """What each of some ranks does."""
    step = st.sampled_from([*(Output(1, "stdout", text) for text in texts), display("P")])
    last = st.sampled_from([(), (failure(),), (display("R", "result"),)])
    script = st.builds(list_of, st.lists(step, max_size=8), last)
    return st.lists(script, min_size=1, max_size=4)


def list_of(*parts: Sequence[Any]) -> list[Any]:
    return [verb for part in parts for verb in part]


def expected_of(script: Sequence[Any]) -> list[str]:
    """The items that a rank with this script causes, told without regard to other ranks or time."""
    items: list[str] = []
    rest = ""

    def after_returns(line: str) -> str:
        return ([part for part in line.split("\r") if part] or [""])[-1]

    for verb in script:
        if isinstance(verb, Output):
            *lines, rest = (rest + verb.text).replace("\r\n", "\n").split("\n")
            items += map(after_returns, lines)
            continue
        if rest:
            items.append(after_returns(rest))
            rest = ""
        items.append({Failed: "Trace", Skipped: "Gap", Display: "Rich"}[type(verb)])
    return [*items, after_returns(rest)] if rest else items


def play(screen: Screen, all_scripts: Sequence[Sequence[Any]], data: st.DataObject) -> None:
    """Let ranks say their parts, interleaved and merged in some way; then end the run."""
    left = {rank: list(script) for rank, script in enumerate(all_scripts)}
    while left:
        speaker = data.draw(st.sampled_from(sorted(left)))
        if not left[speaker]:
            del left[speaker]
            screen.leave(speaker)
            continue
        verb = left[speaker][0]
        alike = [rank for rank, script in left.items() if script and script[0] == verb and rank != speaker]
        chosen = data.draw(st.sets(st.sampled_from(alike))) if alike else set()
        ranks = sorted({speaker, *chosen})
        for rank in ranks:
            left[rank].pop(0)
        screen.say(ranks, verb)
        screen.wait(data.draw(PAUSES))
    screen.finish()


def check_all_shown_once(screen: Screen, all_scripts: Sequence[Sequence[Any]]) -> None:
    for rank, script in enumerate(all_scripts):
        seen = [as_text(item) for ranks, item in screen.shown if rank in ranks]
        assert seen == expected_of(script), f"rank {rank}"


@settings(max_examples=200)
@given(all_scripts=scripts(WHOLE), data=st.data())
def test_every_line_of_every_rank_is_shown_once_in_its_order(
    all_scripts: list[list[Any]], data: st.DataObject
) -> None:
    screen = Screen(range(len(all_scripts)))
    play(screen, all_scripts, data)
    check_all_shown_once(screen, all_scripts)


@settings(max_examples=200)
@given(all_scripts=scripts(PIECES), data=st.data())
def test_every_line_is_shown_once_in_its_order_also_where_lines_come_in_pieces(
    all_scripts: list[list[Any]], data: st.DataObject
) -> None:
    screen = Screen(range(len(all_scripts)))
    play(screen, all_scripts, data)
    check_all_shown_once(screen, all_scripts)


OUT_PIECES = ["a", "b\n", "\rc", "d\r", "e\nf"]
BOTH_STREAMS = st.sampled_from(
    [
        *(Output(1, "stdout", text) for text in OUT_PIECES),
        *(Output(1, "stderr", text.upper()) for text in OUT_PIECES),
        display("P"),
        Skipped(1, 1, 10),
    ]
)


@settings(max_examples=200)
@given(all_scripts=st.lists(st.lists(BOTH_STREAMS, max_size=8), min_size=1, max_size=3), data=st.data())
def test_every_line_of_each_stream_is_shown_once_in_its_order(
    all_scripts: list[list[Any]], data: st.DataObject
) -> None:
    screen = Screen(range(len(all_scripts)))
    play(screen, all_scripts, data)
    for rank, script in enumerate(all_scripts):
        seen = [as_text(item) for ranks, item in screen.shown if rank in ranks]
        for stream, is_its in (("stdout", str.islower), ("stderr", str.isupper)):
            of_stream = [verb for verb in script if not isinstance(verb, Output) or verb.stream == stream]
            wanted = [text for text in expected_of(of_stream) if is_its(text)]
            assert [text for text in seen if is_its(text)] == wanted
        kinds = [text for text in seen if text in ("Rich", "Gap")]
        assert kinds == [
            "Rich" if isinstance(v, Display) else "Gap" for v in script if not isinstance(v, Output)
        ]


@given(script=scripts(PIECES).map(lambda found: found[0]), num_ranks=st.integers(1, 5), data=st.data())
def test_ranks_that_do_the_same_without_pauses_are_one_column(
    script: list[Any], num_ranks: int, data: st.DataObject
) -> None:
    screen = Screen(range(num_ranks))
    left = [list(script) for _ in range(num_ranks)]
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank in range(num_ranks) if left[rank]]))
        screen.say(rank, left[rank].pop(0))
    screen.finish()
    assert [ranks for ranks, _ in screen.shown] == [tuple(range(num_ranks))] * len(expected_of(script))
    check_all_shown_once(screen, [script] * num_ranks)


@given(all_scripts=scripts(PIECES), data=st.data())
def test_after_the_end_nothing_is_held(all_scripts: list[list[Any]], data: st.DataObject) -> None:
    screen = Screen(range(len(all_scripts)))
    play(screen, all_scripts, data)
    assert screen.folder.deadline() is None
    assert screen.folder.take(screen.now + 10, everything=True) == []
    assert not screen.has_unfinished_lines
