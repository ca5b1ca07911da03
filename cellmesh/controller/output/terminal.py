"""Terminal escape sequences: colours as HTML, and lines that a program redraws by moving the cursor
up, as a terminal would show them; pure.

Nested progress bars of a process that a cell starts move the cursor, and so does whatever else
draws for a terminal. Only movements between lines are understood.
"""

from __future__ import annotations

import html
import re

# Every escape sequence that user code prints; only those that end in "m" set colours.
_SEQUENCE = re.compile(
    r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL
)
# Readable on white and on black; the last eight are the bright ones.
_COLOURS = (
    "#7d7d7d", "#d9453d", "#2e9e5b", "#b08800", "#3b82f6", "#b555c8", "#1597a5", "#8c8c8c",
    "#8a8a8a", "#e5534b", "#3fae6b", "#c09a1a", "#5b9bf8", "#c36fd4", "#2ba8b5", "#9a9a9a",
)  # fmt: skip
# A control sequence, but for those of colours; a cursor that is moved up among them.
_MOVEMENT = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")
_CONTROL = re.compile(rf"({_MOVEMENT.pattern}|[\r\n])")
_UP = re.compile(r"\x1b\[(\d{0,4})[AF]$")
_CUT = re.compile(r"\x1b\[[0-9;?]*$|\x1b$")
# More lines than that are no bars: the topmost are let go.
MAX_ROWS = 20
# So long after the cursor went up last, what comes is other output.
QUIET_S = 1.0


# Properties of text, in the order in which they are written, and the codes that set one of them.
_PROPERTIES = ("color", "background-color", "font-weight", "font-style", "text-decoration")
_SETTINGS = {
    1: ("font-weight", "bold"),
    3: ("font-style", "italic"),
    4: ("text-decoration", "underline"),
    22: ("font-weight", ""),
    23: ("font-style", ""),
    24: ("text-decoration", ""),
    39: ("color", ""),
    49: ("background-color", ""),
}

_Style = dict[str, str]


def as_html(text: str) -> str:
    """Escape a text and turn its colours into spans; other escape sequences go."""
    pieces: list[str] = []
    style: _Style = {}
    at = 0
    for match in _SEQUENCE.finditer(text):
        pieces.append(_span(text[at : match.start()], style))
        at = match.end()
        if match[2] == "m":
            style = _restyle(style, match[1])
    return "".join([*pieces, _span(text[at:], style)])


def _span(text: str, style: _Style) -> str:
    css = ";".join(f"{name}:{style[name]}" for name in _PROPERTIES if style.get(name))
    escaped = html.escape(text, quote=False)
    return f'<span style="{css}">{escaped}</span>' if text and css else escaped


def _restyle(style: _Style, parameters: str) -> _Style:
    codes = [int(code[:4]) if code.isdecimal() else 0 for code in re.split("[;:]", parameters)]
    while codes:
        code = codes.pop(0)
        if code == 0:
            style = {}
        elif code in _SETTINGS:
            name, value = _SETTINGS[code]
            style = {**style, name: value}
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = {**style, "color": _COLOURS[code - 30 if code < 90 else code - 82]}
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style = {**style, "background-color": _COLOURS[code - 40 if code < 100 else code - 92]}
        elif code in (38, 48):
            style = {**style, "color" if code == 38 else "background-color": _extended(codes)}
    return style


def _extended(codes: list[int]) -> str:
    """Return the colour that follows code 38 or 48, and remove its codes from the list."""
    kind = codes.pop(0) if codes else 0
    if kind == 2 and len(codes) >= 3:
        red, green, blue = (min(255, codes.pop(0)) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    if kind == 5 and codes:
        index = min(255, codes.pop(0))
        if index < 16:
            return _COLOURS[index]
        if index >= 232:
            return f"#{8 + 10 * (index - 232):02x}" + f"{8 + 10 * (index - 232):02x}" * 2
        steps = (0, 95, 135, 175, 215, 255)
        red, green, blue = (index - 16) // 36, (index - 16) // 6 % 6, (index - 16) % 6
        return f"#{steps[red]:02x}{steps[green]:02x}{steps[blue]:02x}"
    codes.clear()  # not whole: what is left of it means nothing
    return ""


def moves_up(text: str) -> bool:
    """Whether a text moves the cursor to a line above."""
    return "\x1b[" in text and any(_UP.match(part) for part in _CONTROL.findall(text))


def has_controls(text: str) -> bool:
    """Whether a text moves the cursor, or clears."""
    return "\x1b[" in text and _MOVEMENT.search(text) is not None


def strip_controls(text: str) -> str:
    """Remove from a line the sequences that move a terminal's cursor or clear."""
    return _MOVEMENT.sub("", text) if "\x1b[" in text else text


class Canvas:
    """The lines of a small terminal and its cursor, at the end of the lines `above`."""

    def __init__(self, above: str = "") -> None:
        self._rows = [strip_controls(row.rpartition("\r")[2]) for row in above.split("\n")]
        self._row = len(self._rows) - 1
        self._is_new = False  # what comes replaces the line
        self._rest = ""
        self.moved_at = 0.0

    def write(self, text: str, now: float) -> list[str]:
        """Write text at `now`, in seconds; return the topmost lines, which are not redrawn any
        more.
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
        """Whether a text is ordinary output that belongs below the canvas."""
        is_below = self._row == len(self._rows) - 1 and self._rows[-1].strip() == ""
        return is_below and now - self.moved_at > QUIET_S and not moves_up(text)

    def text(self) -> str:
        """The lines of the canvas, without empty ones at the end."""
        return "\n".join(self._rows).rstrip("\n ")

    def _control(self, sequence: str, now: float) -> None:
        up = _UP.match(sequence)
        if up:
            self._row = max(0, self._row - int(up[1] or 1))
            self.moved_at = now
            # tqdm goes up without a return; what it writes next begins with one.
            self._is_new = self._is_new or sequence.endswith("F")
        elif sequence.endswith("K"):
            kind = sequence[2:-1]
            if kind == "2" or self._is_new:
                self._rows[self._row] = ""
        elif sequence.endswith("J"):
            del self._rows[self._row + 1 :]
