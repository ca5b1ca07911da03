"""Progress bars of all ranks: which are one bar, what is said of it, when it is drawn."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

import pytest

from cellmesh.controller.output.bars import (
    REDRAW_S,
    BarBoard,
    Bars,
    as_html,
    as_lines,
    format_count,
    format_rate,
    format_time,
    make_row,
)
from cellmesh.controller.output.console import ConsoleBars
from cellmesh.wire.verbs import Bar


def bar(done: float = 0.0, number: int = 1, **facts: Any) -> Bar:
    known: dict[str, Any] = {"title": "train", "total": 100.0, "elapsed_s": 20.0, "rate": 10.0}
    return Bar(run=1, bar=number, done=done, **{**known, **facts})


class Desk:
    """A board that is drawn whenever it says so, and what was drawn last of each block."""

    def __init__(self, num_ranks: int = 4) -> None:
        self.board = BarBoard(range(num_ranks))
        self.now = 0.0
        self.blocks: dict[int, Bars] = {}
        self.num_drawings = 0

    def say(self, rank: int, word: Bar) -> None:
        """A rank says how far it is; a bar that is new is placed at once."""
        mark = self.board.take(rank, word)
        if mark is not None:
            self.board.place(mark)
        self.look()

    def look(self, is_over: bool = False) -> None:
        drawings = self.board.draw(self.now, is_over=is_over)
        self.num_drawings += len(drawings)
        self.blocks.update((drawing.number, drawing) for drawing in drawings)

    def wait(self, seconds: float = 10.0) -> None:
        until = self.now + seconds
        while (due := self.board.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.look()
        self.now = until

    @property
    def lines(self) -> list[str]:
        """What is to be read now, all blocks one below the other."""
        self.wait()
        return [line for _, block in sorted(self.blocks.items()) for line in as_lines(block)]


def line_of(*bars: Bar) -> str:
    """The line for the bars of ranks 0, 1, ..."""
    (line,) = as_lines(Bars(0, (make_row(1, dict(enumerate(bars))),)))
    return line


# ---- one bar for the mesh


SIZES: dict[str, Any] = {"total": 1e7, "divisor": 1000, "unit": "B", "rate": 1e6}
NOTES = ("loss=0.30, lr=1e-3", "loss=-0.5, lr=1e-3", "loss=0.45, lr=1e-3")


@pytest.mark.parametrize(
    ("bars", "part"),
    [
        ([bar(42), bar(43)], "| 42-43/100  10 it/s"),
        ([bar(7, total=0.0), bar(9, total=0.0)], "train 7-9 it  [rank 0 slowest]  10 it/s, 0:20"),
        ([bar(100, state="done"), bar(100, state="done", elapsed_s=75.0)], "  10 it/s, in 1:15"),
        ([bar(90), bar(10), bar(10), bar(90)], "[ranks 1-2 slowest]"),
        (
            [bar(30, state="done"), bar(50), bar(90)],
            "50 % |█████     | 50-90/100  [rank 1 slowest]",
        ),
        ([bar(20, total=40.0), bar(90)], "20/40 - 90/100"),
        ([bar(2.5e6, **SIZES)], "2.5M/10MB  1MB/s, 0:08 left"),
        ([bar(5, note=note) for note in NOTES], "  loss=-0.5 … 0.45 (rank 2), lr=1e-3"),
        ([bar(5, note="a=b"), bar(5, note="a=c")], "  a=b…"),
        ([bar(40, state="done"), bar(41, state="done")], " 40-41/100  10 it/s, in 0:20"),
    ],
)
def test_the_bar_of_several_ranks(bars: Sequence[Bar], part: str) -> None:
    assert part in line_of(*bars)


def test_a_bar_as_text() -> None:
    bars = [bar(done, note="a=0.3") for done in (57, 50, 57)]
    assert line_of(*bars, bar(42, rate=12.1, note="a=0.3")) == (
        "[0-3] train  42 % |████▏     | 42-57/100  [rank 3 slowest]  12.1 it/s, 0:05 left  a=0.3"
    )
    rows = [make_row(1, {0: bar(40, state="done"), 1: bar(done)}) for done in (10, 100)]
    assert [row.state for row in rows] == ["open", "open"]
    states = [make_row(1, {0: bar(done, state="done")}).state for done in (40, 100)]
    assert states == ["short", "done"]
    many = {rank: bar(90 if rank % 2 else 10) for rank in range(64)}
    assert make_row(1, many).mark == "32 ranks (0,2,4,…) slowest"


def test_the_last_word_counts_and_a_late_one_does_not() -> None:
    desk = Desk(1)
    desk.say(0, bar(10))
    desk.say(0, bar(50, state="done"))
    desk.say(0, bar(45))
    assert "50/100" in desk.lines[0]
    desk.say(0, bar(50, state="removed"))
    assert desk.lines == []


def test_first_bars_are_one_and_second_ones_too() -> None:
    desk = Desk(2)
    desk.say(0, bar(100, 1, state="done"))
    desk.say(0, bar(20, 2))
    desk.say(1, bar(80, 1))
    assert [re.search(r"\S+/100", line).group() for line in desk.lines] == ["80-100/100", "20/100"]  # type: ignore[union-attr]


def test_nested_bars_stand_below_theirs_and_are_indented() -> None:
    desk = Desk(1)
    desk.say(0, bar(1, 1, title="epoch"))
    desk.board.bury()
    desk.say(0, bar(5, 2, title="batch", num_outer=1))
    assert [line.split("  |")[0].partition(" %")[0] for line in desk.lines] == [
        "[0] epoch     1",
        "[0]   batch   5",
    ]
    assert len(desk.blocks) == 1
    desk.board.bury()  # a bar that is not nested has a block of its own after other output
    desk.say(0, bar(3, 3))
    desk.wait()
    assert [len(block.rows) for block in desk.blocks.values()] == [2, 1]


def test_hundreds_of_bars_one_after_the_other_are_a_few_lines() -> None:
    desk = Desk(2)
    for number in range(1, 501):
        for rank in range(2):
            desk.say(rank, bar(0, number))
            desk.say(rank, bar(100, number, state="done"))
    assert desk.lines[0] == "… 490 more"
    assert len(desk.lines) == 11
    assert len(desk.board._members) == 20


def test_bars_are_drawn_ten_times_a_second_at_most() -> None:
    desk = Desk(8)
    for step in range(1000):
        for rank in range(8):
            desk.say(rank, bar(step / 10))
        desk.now += 0.01
        desk.look()
    assert desk.num_drawings <= 10.0 / REDRAW_S + 1
    assert desk.num_drawings > 50


def test_the_last_state_is_drawn_in_the_end() -> None:
    desk = Desk(1)
    desk.say(0, bar(1))
    desk.say(0, bar(2))
    assert "1/100" in as_lines(desk.blocks[0])[0]
    desk.look(is_over=True)
    assert "2/100" in as_lines(desk.blocks[0])[0]
    assert desk.blocks[0].closed
    assert desk.board.deadline() is None


def test_text_of_users_is_escaped() -> None:
    evil = '</span><script>alert("1")</script><img src=x onerror="1">'
    bars = {0: bar(3, title=evil, note=evil, unit=evil), 1: bar(9, title=evil, note="x", unit=evil)}
    page = as_html(Bars(0, (make_row(1, bars),)))
    assert set(re.findall(r"<\W*(\w+)", page)) == {"div", "span"}
    assert evil in html.unescape(page)


def test_terminal_shows_ended_bars_once_and_running_bars_in_one_line() -> None:
    desk, console = Desk(1), ConsoleBars()
    desk.say(0, bar(100, 1, title="one", state="done"))
    assert console.ended(desk.blocks[0]) == "[0] one 100 % |██████████| 100/100  10 it/s, in 0:20\n"
    desk.say(0, bar(10, 2, title="two"))
    desk.wait()
    assert console.ended(desk.blocks[0]) == ""
    assert console.going(desk.blocks[0]).startswith("[0] two  10 % |█         | 10/100")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_count(1234567, 0), "1,234,567"),
        (format_count(1536, 1024), "1.5k"),
        (format_rate(12.13, "it"), "12.1 it/s"),
        (format_rate(0.25, "it"), "4 s/it"),
        (format_rate(float("inf"), "it"), ""),
        (format_time(3723), "1:02:03"),
        (format_time(float("inf")), "?"),
        (format_time(-1), "0:00"),
    ],
)
def test_counts_rates_and_times_are_short(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize(
    ("rates", "stats"),
    [
        ((49.3, 40, 45, 12.4), "12.4 it/s … 49.3 it/s, in 4.8 s, rank 3 slowest"),
        ((10, 10.5), "10 it/s, in 4.8 s"),
        ((0.5, 20), "2 s/it … 20 it/s, in 4.8 s, rank 0 slowest"),
        ((0, 0), "in 4.8 s"),
    ],
)
def test_bars_that_have_ended_keep_the_rates_of_ranks(rates: Sequence[float], stats: str) -> None:
    ended = [bar(100, state="done", rate=float(rate), elapsed_s=4.8) for rate in rates]
    row = make_row(1, dict(enumerate(ended)))
    assert (row.state, row.stats) == ("done", stats)
