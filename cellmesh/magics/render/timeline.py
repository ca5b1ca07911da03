"""What ranks did over time, a row for each rank: of a profile or of the last cells, drawn as text;
`timeline_svg` draws it as a picture. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TypeVar

from ...controller.trace.history import History
from ...controller.trace.operations import Operation
from ...controller.trace.profile import Profile
from .tables import format_time

# Of more ranks those are drawn that differ most from the others.
_MAX_RANKS, _NUM_DIFFERENT = 64, 16
_TEXT_COLUMNS = 72

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Row:
    """One rank's row of the drawing, in nanoseconds from its begin; the note stands below the
    rank's name.
    """

    rank: int
    busy: Sequence[tuple[int, int]]
    bars: Sequence[Operation]
    note: str = ""


@dataclass(frozen=True)
class Timeline:
    """The operators and collectives of each rank over time.

    Attributes:
        rows: one a rank.
        length_ns: from the first rank's begin to the last one's end.
        busy_name: what a rank does where it is busy.
        marks: when something begins, and what.
        num_left_out: how many ranks are not drawn, as they are like the others.
    """

    rows: Sequence[Row]
    length_ns: int
    busy_name: str = "operators"
    marks: Sequence[tuple[int, str]] = ()
    num_left_out: int = 0

    @cached_property
    def names(self) -> list[str]:
        """The names of the drawn collectives, those with the longest total time first."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            for bar in row.bars:
                totals[bar.name] += bar.end_ns - bar.start_ns
        return [name for name, _ in totals.most_common()]

    @property
    def left_out(self) -> str:
        """A sentence on ranks that are not drawn; "" if there are none."""
        if not self.num_left_out:
            return ""
        num, num_all = len(self.rows), len(self.rows) + self.num_left_out
        return f"{num} of {num_all} ranks are drawn: those that differ most from the others"


def timeline_of(profile: Profile) -> Timeline:
    """Return the timeline of a profile, to be drawn."""
    start = profile.start_ns
    rows = []
    for rank, ours in profile.operations.items():
        busy = profile.by_rank[rank].busy
        spans = [(begin - start, begin - start + took) for begin, took in busy]
        rows.append(Row(rank, spans, ours))
    return _of_few(Timeline(rows, max(1, round(profile.took_s * 1e9))))


def timeline_of_history(history: History) -> Timeline:
    """Return the timeline of the last cells, to be drawn without the pauses between them."""
    shifts = {cell.run: cell.shift_ns for cell in history.cells}
    straggler = history.straggler
    rows = []
    for rank in history.ranks:
        busy = [
            (begin - cell.shift_ns, end - cell.shift_ns)
            for cell in history.cells
            for begin, end in history.computing(rank, cell)
        ]
        bars = [
            replace(one, start_ns=one.start_ns - shifts[one.run])
            for one in history.operations.get(rank, ())
        ]
        rows.append(Row(rank, busy, bars, "straggler" if rank == straggler else ""))
    marks = [(cell.begin_ns - cell.shift_ns, cell.title) for cell in history.cells]
    return _of_few(Timeline(rows, max(1, history.length_ns), "compute", marks))


def _of_few(timeline: Timeline) -> Timeline:
    many = len(timeline.rows) > _MAX_RANKS
    return with_few(timeline, _NUM_DIFFERENT) if many else timeline


def with_few(timeline: Timeline, num_ranks: int) -> Timeline:
    """Leave out all ranks but those with a note, and those that differ most from the others in how
    long they were busy or waited.
    """
    times = [
        (
            sum(end - begin for begin, end in row.busy),
            sum(bar.waited_ns for bar in row.bars),
        )
        for row in timeline.rows
    ]
    usual = [median(column) for column in zip(*times, strict=True)]
    apart = [
        sum(abs(own - other) for own, other in zip(pair, usual, strict=True)) for pair in times
    ]
    order = sorted(
        range(len(apart)), key=lambda index: (not timeline.rows[index].note, -apart[index])
    )
    kept = sorted(order[:num_ranks])
    rows = [timeline.rows[index] for index in kept]
    num_left_out = timeline.num_left_out + len(timeline.rows) - len(rows)
    return replace(timeline, rows=rows, num_left_out=num_left_out)


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
    cells: list[Counter[str]] = [Counter() for _ in range(_TEXT_COLUMNS)]
    for start_ns, end_ns in row.busy:
        cover(cells, timeline.length_ns, start_ns, end_ns, "#")
    for bar in row.bars:
        letter = letters.get(bar.name, "?")
        middle = bar.start_ns + bar.waited_ns
        cover(cells, timeline.length_ns, bar.start_ns, middle, letter.lower())
        cover(cells, timeline.length_ns, middle, bar.end_ns, letter)
    column_ns = timeline.length_ns / _TEXT_COLUMNS
    return "".join(
        max(cell, key=lambda mark: (cell[mark], mark))
        if sum(cell.values()) >= column_ns / 4
        else " "
        for cell in cells
    ).rstrip()


def cover(cells: list[Counter[T]], length_ns: int, start_ns: int, end_ns: int, mark: T) -> None:
    """Add the nanoseconds of a span to each of the equal parts of an axis that it covers.

    Args:
        cells: the parts; what covers each, and for how long.
        length_ns: of the axis.
        start_ns, end_ns: the span.
        mark: what covers it.
    """
    column_ns = length_ns / len(cells)
    first = max(0, int(start_ns / column_ns))
    last = min(len(cells) - 1, int(max(0, end_ns - 1) / column_ns))
    for index in range(first, last + 1):
        covered = min(end_ns, (index + 1) * column_ns) - max(start_ns, index * column_ns)
        if covered > 0:
            cells[index][mark] += int(covered)
