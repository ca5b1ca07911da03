"""Interprets terminal escape sequences: converts colours to HTML, and applies cursor movements to
the last lines of output. Pure.

Nested progress bars, and other programs that draw for a terminal, move the cursor up to redraw
lines. Only movements between lines are interpreted.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ansi2html import Ansi2HTMLConverter

# Any escape sequence; sequences that end in "m" set colours and styles.
_SEQUENCE = re.compile(
    r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL
)
# Maximum length of a style sequence; longer ones are dropped.
_MAX_STYLE = 64
# Legible on white and on black; the last eight are the bright colours.
_COLOURS = (
    "#7d7d7d", "#d9453d", "#2e9e5b", "#b08800", "#3b82f6", "#b555c8", "#1597a5", "#8c8c8c",
    "#8a8a8a", "#e5534b", "#3fae6b", "#c09a1a", "#5b9bf8", "#c36fd4", "#2ba8b5", "#9a9a9a",
)  # fmt: skip
# A style as the converter writes it, and a background colour in it.
_STYLE = re.compile(r'(?<=<span style=")[^"<>]*(?=">)')
_GROUND = re.compile(r"background(?:-color)?: #\w{6}")
_TEXT = re.compile(r"(?<![-\w])color: (#\w{6})")
# Text of such luminance has a contrast of 3 or more with the grounds of light and dark themes.
_DARKEST, _BRIGHTEST = 0.12, 0.3
# A control sequence other than those of colours, and one that moves the cursor up.
_MOVEMENT = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")
_CONTROL = re.compile(rf"({_MOVEMENT.pattern}|[\r\n])")
_UP = re.compile(r"\x1b\[(\d{0,4})[AF]$")
_CUT = re.compile(r"\x1b\[[0-9;?]*$|\x1b$")
# Maximum number of lines that may be redrawn: the topmost of more lines are final.
MAX_ROWS = 20
# Time after the last movement up from which new text is ordinary output.
QUIET_S = 1.0


def as_html(text: str) -> str:
    """Convert a text to HTML: colours become spans, legible in light and dark themes; other escape
    sequences are dropped.
    """
    page = _converter().convert(_SEQUENCE.sub(_keep_style, text), full=False)
    return _STYLE.sub(lambda style: _legible(style[0]), page)


@functools.lru_cache(maxsize=1000)
def _legible(style: str) -> str:
    """Make a style's background pale, or else its text neither too dark nor too bright."""
    if _GROUND.search(style):
        return _GROUND.sub(r"\g<0>40", style)
    return _TEXT.sub(lambda text: f"color: {_between(text[1])}", style)


def _between(colour: str) -> str:
    """Return a colour that is darker or brighter, if it is not legible in both themes."""
    linear = [(int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]
    own = sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    if own > _BRIGHTEST:
        linear = [part * _BRIGHTEST / own for part in linear]
    elif own < _DARKEST:
        share = (_DARKEST - own) / (1 - own)
        linear = [part + share * (1 - part) for part in linear]
    else:
        return colour
    return "#" + "".join(f"{round(255 * part ** (1 / 2.2)):02x}" for part in linear)


def _keep_style(sequence: re.Match[str]) -> str:
    is_style = sequence[2] == "m" and len(sequence[1]) <= _MAX_STYLE
    return sequence[0] if is_style else ""


@functools.cache
def _converter() -> Ansi2HTMLConverter:
    from ansi2html import Ansi2HTMLConverter, style  # takes 50 ms, so only when needed

    style.SCHEME["cellmesh"] = _COLOURS
    return Ansi2HTMLConverter(inline=True, scheme="cellmesh")


def moves_up(text: str) -> bool:
    """Return whether a text moves the terminal's cursor to a line above."""
    return "\x1b[" in text and any(_UP.match(part) for part in _CONTROL.findall(text))


def has_controls(text: str) -> bool:
    """Return whether a text moves the terminal's cursor or clears a part of the terminal."""
    return "\x1b[" in text and _MOVEMENT.search(text) is not None


def strip_controls(text: str) -> str:
    """Remove the sequences from a line that move a terminal's cursor or clear."""
    return _MOVEMENT.sub("", text) if "\x1b[" in text else text


class Canvas:
    """The last lines of a terminal, which a program may redraw, with the cursor's position."""

    def __init__(self, above: str = "") -> None:
        self._rows = [strip_controls(row.rpartition("\r")[2]) for row in above.split("\n")]
        self._row = len(self._rows) - 1
        self._is_new = False  # whether the next text replaces the line
        self._rest = ""
        self.moved_at = 0.0

    def write(self, text: str, now: float) -> list[str]:
        """Write text at the time `now`, in seconds; return the topmost lines that can no longer be
        redrawn.
        """
        text = self._rest + text
        cut = _CUT.search(text)
        text, self._rest = (text[: cut.start()], cut[0]) if cut else (text, "")
        for part in _CONTROL.split(text):
            if part == "\n":
                self._row += 1
                if self._row == len(self._rows):
                    self._rows.append("")
                self._is_new = False
            elif part == "\r":
                self._is_new = True
            elif part.startswith("\x1b[") and _CONTROL.fullmatch(part):
                self._control(part, now)
            elif part:
                self._rows[self._row] = part if self._is_new else self._rows[self._row] + part
                self._is_new = False
        num_over = max(0, min(len(self._rows) - MAX_ROWS, self._row))
        over, self._rows = self._rows[:num_over], self._rows[num_over:]
        self._row -= num_over
        return over

    def ends(self, text: str, now: float) -> bool:
        """Return whether a text ends the redrawing of lines, as ordinary output below them."""
        is_below = self._row == len(self._rows) - 1 and self._rows[-1].strip() == ""
        return is_below and now - self.moved_at > QUIET_S and not moves_up(text)

    def text(self) -> str:
        """Return the lines of the canvas, without empty ones at the end."""
        return "\n".join(self._rows).rstrip("\n ")

    def _control(self, sequence: str, now: float) -> None:
        up = _UP.match(sequence)
        if up:
            self._row = max(0, self._row - int(up[1] or 1))
            self.moved_at = now
            # tqdm moves up without a carriage return, and begins its next text with one.
            self._is_new = self._is_new or sequence.endswith("F")
        elif sequence.endswith("K"):
            kind = sequence[2:-1]
            if kind == "2" or self._is_new:
                self._rows[self._row] = ""
        elif sequence.endswith("J"):
            del self._rows[self._row + 1 :]
