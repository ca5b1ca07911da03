"""Draws a timeline as text, for terminals. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .time_axis import cover, format_time

if TYPE_CHECKING:
    from .timeline import Row, Timeline

_COLUMNS = 72


def draw_text(timeline: Timeline) -> str:
    """Draw the timeline for a terminal: a letter for each collective, in lower case while it
    waits.
    """
    letters = dict(zip(timeline.names, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    width = max((len(f"rank {row.rank}") for row in timeline.rows), default=0)
    lines = [
        f"{f'rank {row.rank}':<{width}}  {_text_row(timeline, row, letters)}"
        for row in timeline.rows
    ]
    legend = [f"# {timeline.busy_name}", *(f"{letter} {name}" for name, letter in letters.items())]
    if letters:
        legend.append("small letters: waits for another rank")
    lines += [left_out] if (left_out := timeline.left_out) else []
    lines.append(f"{'':<{width}}  0 to {format_time(timeline.length_ns)}; {', '.join(legend)}")
    return "\n".join(lines)


def _text_row(timeline: Timeline, row: Row, letters: Mapping[str, str]) -> str:
    cells: list[Counter[str]] = [Counter() for _ in range(_COLUMNS)]
    for start_ns, end_ns in row.busy:
        cover(cells, timeline.length_ns, start_ns, end_ns, "#")
    for bar in row.bars:
        letter = letters.get(bar.name, "?")
        middle = bar.start_ns + bar.waited_ns
        cover(cells, timeline.length_ns, bar.start_ns, middle, letter.lower())
        cover(cells, timeline.length_ns, middle, bar.end_ns, letter)
    column_ns = timeline.length_ns / _COLUMNS
    return "".join(
        max(cell, key=lambda mark: (cell[mark], mark))
        if sum(cell.values()) >= column_ns / 4
        else " "
        for cell in cells
    ).rstrip()
