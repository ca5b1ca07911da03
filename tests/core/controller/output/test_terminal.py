"""Terminal escape sequences: lines that a program redraws by moving the cursor up, and
colours.
"""

from __future__ import annotations

import html
import re

import pytest

from cellmesh.controller.output.terminal import (
    MAX_ROWS,
    QUIET_S,
    Canvas,
    as_html,
    has_controls,
    moves_up,
    strip_controls,
)

from ....support.folded_reader import LONG_S, Screen

UP = "\x1b[A"


def test_only_what_moves_is_seen_as_such() -> None:
    assert moves_up("a\x1b[2Ab")
    assert not moves_up(f"\x1b[31mred\x1b[0m\x1b[K\x1b[{'1' * 5000}A")
    assert has_controls("\x1b[?25l")
    assert not has_controls("\x1b[31mred\x1b[0m")
    assert strip_controls("\r\x1b[2K\x1b[31mred\x1b[0m\x1b[K") == "\r\x1b[31mred\x1b[0m"


def test_movements_are_followed() -> None:
    canvas = Canvas()
    canvas.write("one 1\ntwo 1", 0.0)
    canvas.write("\r\x1b[2K\x1b[1A\x1b[2Kone 2\ntwo 2", 0.0)  # as rich does
    assert canvas.text() == "one 2\ntwo 2"
    for piece in ("\x1b", "[", "A\rc"):  # a sequence that is cut
        canvas.write(piece, 0.0)
    assert canvas.text() == "c\ntwo 2"


def test_live_lines_are_bounded() -> None:
    canvas = Canvas()
    over = [line for number in range(100) for line in canvas.write(f"{number}\n", 0.0)]
    assert len(over) == 101 - MAX_ROWS
    assert over[0] == "0"


def test_a_rank_that_draws_for_a_terminal_has_its_lines_in_one_place() -> None:
    screen = Screen((0,))
    for outer in range(3):
        screen.print(0, f"\router {outer}")
        for inner in range(3):
            screen.print(0, f"\n\rinner {inner}{UP}")
            screen.wait(LONG_S)
    assert screen.text == ["[0] outer 2\ninner 2"]
    screen.print(0, "\n\n")
    screen.wait(QUIET_S * 2)
    screen.print(0, "after\n")
    screen.finish()
    assert screen.text == ["[0] outer 2\ninner 2", "[0] after"]


def test_no_escapes_are_left_of_one_that_was_never_shown_unfinished() -> None:
    screen = Screen((0, 1))
    screen.print((0, 1), f"\router 1\n\rinner 1{UP}\router 2\n\n")
    screen.print((0, 1), "\x1b[?25hdone\x1b[K\n")
    screen.finish()
    assert screen.text == ["[0-1] outer 2", "[0-1] inner 1", "[0-1] done"]


@pytest.mark.parametrize("number", [16, 18, 231])
def test_colours_are_legible_in_both_themes(number: int) -> None:
    colour = re.search(r"(?<![-\w])color: (#\w{6})", as_html(f"\x1b[38;5;{number}mx\x1b[0m"))
    assert colour is not None
    red, green, blue = ((int(colour[1][at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    assert 0.11 < 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.31


LOOKS_LIKE_A_STYLE = '<span style="color: #ffffff">'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (LOOKS_LIKE_A_STYLE, html.escape(LOOKS_LIKE_A_STYLE, quote=False)),
        ("\x1b[1;32mok\x1b[0m.", '<span style="font-weight: bold; color: #2e9e5b">ok</span>.'),
        ("\x1b[38;5;196mx\x1b[39my", '<span style="color: #ff0000">x</span>y'),
        ("\x1b[38;2;200;90;60mx", '<span style="color: #C85A3C">x</span>'),
        ("\x1b[48;5;255mx\x1b[49m", '<span style="background: #eeeeee40">x</span>'),
        ("\x1b[31;43mx", '<span style="color: #d9453d; background-color: #b0880040">x</span>'),
        ("a\x1b[2K\x1b[1Ab\x1b]0;title\x07c\x1b", "abc"),
        ("a\x1b]8;;javascript:alert(1)\x07b\x1b]8;;\x07", "ab"),
        pytest.param("\x1b[" + "1" * 5000 + "mx", "x", id="a long code"),
    ],
)
def test_colours_of_a_terminal(text: str, shown: str) -> None:
    assert as_html(text) == shown
