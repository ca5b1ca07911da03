"""Folding: equal output is shown once, none waits long for its like, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from cellmesh.wire.messages import Failed
from cellmesh.wire.verbs import Output, Skipped

from ....support.examples import examples
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
from ....support.step_counter import growth

BOTH = (0, 1)
RESULT = display("42", "result")


def screen_of(num_ranks: int, *steps: Step) -> Screen:
    return Screen(range(num_ranks)).play(*steps)


def own_lines(screen: Screen, rank: int) -> list[str]:
    return [as_text(item) for ranks, item in screen.shown if rank in ranks]


@pytest.mark.parametrize(
    ("num_ranks", "steps", "shown"),
    [
        (2, [(BOTH, "\n\na\n")], ["[0-1] ", "[0-1] ", "[0-1] a"]),
        (1, [(0, "mine\n")], ["[0] mine"]),
        (2, [(0, "step\n"), HOLD_S * 0.9], []),
        (2, [(0, "step\n"), (1, "step\n")], ["[0-1] step"]),
        (2, [(0, "alone\n"), (1, LEAVES)], ["[0] alone"]),
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
    num_ranks: int, steps: Sequence[Step], shown: list[str]
) -> None:
    assert screen_of(num_ranks, *steps).text == shown


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
            [(rank, "b\nc\n" if rank == 2 else "a\nb\nc\n") for rank in ALL],
            ["[0-1,3] a", "[0-3] b", "[0-3] c"],
        ),
        (2, [(0, "a\nb\n"), (1, "b\na\n")], ["[0] a", "[0-1] b", "[1] a"]),
        (2, [(BOTH, "half"), (BOTH, LEAVES)], ["[0-1] half"]),
        (
            4,
            [(2, "b\n"), (0, "a\n"), (3, "unfinished"), (1, display("P"))],
            ["[0] a", "[1] Rich", "[2] b", "[3] unfinished"],
        ),
    ],
)
def test_equal_output_is_folded(num_ranks: int, steps: Sequence[Step], shown: list[str]) -> None:
    screen = screen_of(num_ranks, *steps)
    screen.finish()
    assert sorted(screen.text) == sorted(shown)
    assert [each for each in screen.text if "-" in each] == [each for each in shown if "-" in each]
    assert not screen.has_unfinished_lines


@pytest.mark.parametrize("odd", ALL)
def test_an_odd_line_in_every_step_unfolds_none(odd: int) -> None:
    screen = Screen(ALL)
    for step in range(20):
        screen.play(*((r, f"{step}\n" + (f"odd {step}\n" if r == odd else "")) for r in ALL))
        screen.wait(LONG_S)
    screen.finish()
    lines = ((f"[0-3] {step}", f"[{odd}] odd {step}") for step in range(20))
    assert screen.text == [line for pair in lines for line in pair]
    # As ranks print: the first line after a pause is sent at once, those after it are gathered.
    others = [rank for rank in ALL if rank != odd]
    screen = screen_of(4, (odd, "odd\n"), (others, "step\n"), SHORT_S, (odd, "step\n"))
    screen.finish()
    assert screen.text == [f"[{odd}] odd", "[0-3] step"]


def test_a_flood_is_folded_as_single_lines_are() -> None:
    lines = [f"{n}\n" for n in range(200)]
    odd = [*lines[:90], "odd\n", *lines[90:]]
    flood = screen_of(3, (0, "".join(lines)), (1, "".join(odd)), (2, "".join(lines[:150])))
    flood.play((2, "".join(lines[150:])))
    flood.finish()
    shown = [f"[0-2] {line[:-1]}" for line in lines]
    assert flood.text == [*shown[:90], "[1] odd", *shown[90:]]


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
    assert folder.deadline() is None
    for ranks, text, pause, leaving in prints:
        folder.feed(tuple(sorted(ranks)), Output(1, "stdout", text), now)
        folder.leave(leaving, now)
        for moment in (now, now + pause):
            due = folder.deadline()
            assert bool(folder.take(moment)) == (due is not None and due <= moment)
        now += pause


def test_an_unfinished_line_is_shown_after_a_while_and_redrawn() -> None:
    screen = screen_of(1, (0, "loading"))
    assert screen.text == []
    screen.wait(LONG_S)
    assert screen.text == ["[0] loading"]
    assert screen.has_unfinished_lines
    screen.print(0, " ... done\n")
    assert screen.text == ["[0] loading ... done"]
    assert not screen.has_unfinished_lines


def test_progress_is_redrawn_in_place_while_lines_pass_by() -> None:
    screen = screen_of(3, (BOTH, "\r10%"), LONG_S, (2, "line\n"), LONG_S)
    for percent in range(20, 101, 10):
        screen.play((0, f"\r{percent}%"), (1, f"\r{percent // 2}%"), LONG_S)
    screen.print(BOTH, "\n")
    screen.finish()
    assert screen.text == ["[0] 100%", "[1] 50%", "[2] line"]
    assert len(screen.redraws) > 10


def test_one_bar_after_the_other_keeps_the_finished_one() -> None:
    done, second = "\repoch 1: 100%\n", "\repoch 2: 10%"
    screen = screen_of(2, (BOTH, "\repoch 1: 50%"), LONG_S, (0, done), (0, second), LONG_S)
    screen.play((1, done), (BOTH, "\repoch 2: 100%\n"))
    screen.finish()
    for rank in BOTH:
        ended = [line for line in own_lines(screen, rank) if "100%" in line]
        assert ended == ["epoch 1: 100%", "epoch 2: 100%"]


def test_items_that_differ_in_kind_or_text_are_blocks_of_their_own() -> None:
    out, err = Output(1, "stdout", "x\n"), Output(1, "stderr", "x\n")
    result, failed, other = display("42", "result"), failure(), failure("else")
    said: list[Step] = [(0, out), (1, err), (0, display("42", display_id="a")), (1, result)]
    said += [(3, display("42", display_id="b")), (BOTH, failed), (3, failed), (2, other)]
    screen = screen_of(4, *said, (BOTH, Skipped(1, 10, 1000)))
    screen.finish()
    blocks = {block.item: (block.ranks, "".join(block.display_ids)) for block in screen.blocks}
    assert blocks == {
        Line("stdout", "x"): ((0,), ""),
        Line("stderr", "x"): ((1,), ""),
        Rich("display", b"42"): ((0, 3), "ab"),
        Rich("result", b"42"): ((1,), ""),
        Trace("ValueError", "no", "Traceback: no"): ((0, 1, 3), ""),
        Trace("ValueError", "else", "Traceback: else"): ((2,), ""),
        Gap(10, 1000): ((0, 1), ""),
    }


PIECES = ["a", "b", "\r", "\n", "a\n", "\r10%", "\r20%\n", "c\r\n", "x\ny"]
PAUSES = st.sampled_from([0.0, SHORT_S, HOLD_S * 0.6, LONG_S, LONG_S, HOLD_RESULT_S * 2])
STEPS = st.sampled_from([*(Output(1, "stdout", text) for text in PIECES), display("P")])
LAST = st.sampled_from([[], [failure()], [display("R", "result")]])
SCRIPTS = st.builds(lambda steps, last: steps + last, st.lists(STEPS, max_size=8), LAST)


def expected_of(script: Sequence[Any]) -> list[str]:
    """The items that a rank with this script causes, without regard to other ranks or time."""
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
        items.append("Trace" if isinstance(verb, Failed) else "Rich")
    return [*items, after_returns(rest)] if rest else items


def play(all_scripts: Sequence[Sequence[Any]], data: st.DataObject) -> Screen:
    """Let ranks say their parts, interleaved and merged in some way; then end the run."""
    screen = Screen(range(len(all_scripts)))
    left = {rank: list(script) for rank, script in enumerate(all_scripts)}
    while left:
        speaker = data.draw(st.sampled_from(sorted(left)))
        if not left[speaker]:
            del left[speaker]
            screen.leave(speaker)
            continue
        verb = left[speaker][0]
        alike = [rank for rank, script in left.items() if script and script[0] == verb]
        ranks = sorted(data.draw(st.sets(st.sampled_from(alike))) | {speaker})
        for rank in ranks:
            left[rank].pop(0)
        screen.say(ranks, verb)
        screen.wait(data.draw(PAUSES))
    screen.finish()
    return screen


@examples(200)
@given(all_scripts=st.lists(SCRIPTS, min_size=1, max_size=4), data=st.data())
def test_every_line_of_every_rank_is_shown_once_in_its_order(
    all_scripts: list[list[Any]], data: st.DataObject
) -> None:
    screen = play(all_scripts, data)
    for rank, script in enumerate(all_scripts):
        assert own_lines(screen, rank) == expected_of(script), f"rank {rank}"
    assert screen.folder.deadline() is None
    assert screen.folder.take(screen.now + 10, everything=True) == []
    assert not screen.has_unfinished_lines


@given(script=SCRIPTS, num_ranks=st.integers(1, 5), data=st.data())
def test_ranks_that_do_the_same_without_pauses_are_one_column(
    script: list[Any], num_ranks: int, data: st.DataObject
) -> None:
    screen = Screen(range(num_ranks))
    left = [list(script) for _ in range(num_ranks)]
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank in range(num_ranks) if left[rank]]))
        screen.say(rank, left[rank].pop(0))
    screen.finish()
    wanted = [(tuple(range(num_ranks)), text) for text in expected_of(script)]
    assert [(ranks, as_text(item)) for ranks, item in screen.shown] == wanted


@pytest.mark.parametrize(
    "line",
    [
        lambda rank, n: f"step {n}\n",
        lambda rank, n: f"step {n} loss {rank / 7}\n",
        lambda rank, n: f"{'x' * rank} {n}\n",
        lambda rank, n: f"{'ab'[rank % 2]}\n",
        lambda rank, n: f"\r{rank} {n}",
        lambda rank, n: Failed(1, "ValueError", str(rank), f"at {rank}", 4),
    ],
    ids=["equal", "numbers", "own words", "two kinds", "unfinished", "failures"],
)
@pytest.mark.parametrize("folds_numbers", [False, True])
def test_work_grows_with_the_lines(line: Callable[[int, int], Any], folds_numbers: bool) -> None:
    def work(num_ranks: int) -> Callable[[], Any]:
        folder = Folder(range(num_ranks), folds_numbers=folds_numbers)

        def fold() -> None:
            for n in range(3):
                for rank in range(num_ranks):
                    said = line(rank, n)
                    verb = Output(1, "stdout", said) if isinstance(said, str) else said
                    folder.feed((rank,), verb, float(n))
                    folder.deadline()
                    folder.take(float(n))
            folder.leave(range(num_ranks), 3.0)
            folder.take(4.0, everything=True)

        return fold

    assert growth(work, 16) < 6
