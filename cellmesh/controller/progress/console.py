"""Progress bars in a terminal: a line for each once it has ended; while they run, one that is
redrawn.
"""

from __future__ import annotations

from dataclasses import replace

from .bars import Bars
from .drawing import as_lines

# Of bars that go on, so many are in the line.
_MAX_GOING = 2


class ConsoleBars:
    """What a terminal has been shown of a run's bars."""

    def __init__(self) -> None:
        self._shown: dict[int, object] = {}

    def ended(self, bars: Bars) -> str:
        """Lines for bars that have ended and have not been shown like that; with newlines."""
        if not bars.closed:
            return ""
        rows = tuple(
            row for row in bars.rows if self._shown.get(row.number) != (row.ranks, row.state)
        )
        self._shown.update((row.number, (row.ranks, row.state)) for row in rows)
        lines = as_lines(
            replace(bars, rows=rows, num_passed=bars.num_passed if rows else 0, num_more=0)
        )
        return "".join(f"{line}\n" for line in lines)

    def going(self, bars: Bars) -> str:
        """A line with those that go on, the innermost last; "" if none does."""
        rows = tuple(row for row in bars.rows if row.state == "open")
        if bars.closed or not rows:
            return ""
        return "   ".join(as_lines(Bars(bars.number, rows[-_MAX_GOING:])))
