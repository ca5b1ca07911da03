"""Progress bars in a terminal: one line for each bar that has ended, one redrawn line for those
that run.
"""

from __future__ import annotations

from dataclasses import replace

from .bars import Bars
from .drawing import as_lines

# Of bars that go on, so many are in the line.
_MAX_GOING = 2


class ConsoleBars:
    """The bars that a terminal has shown for one run."""

    def __init__(self) -> None:
        self._shown: dict[int, object] = {}

    def ended(self, bars: Bars) -> str:
        """Return lines, with newlines, for bars that have ended and are not shown as ended yet."""
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
        """Return one line with the bars that still run, the innermost last; "" if there is none."""
        rows = tuple(row for row in bars.rows if row.state == "open")
        if bars.closed or not rows:
            return ""
        return "   ".join(as_lines(Bars(bars.number, rows[-_MAX_GOING:])))
