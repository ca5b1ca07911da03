"""Draws the activity of ranks over time, a row for each rank: as text, and as an SVG picture whose
bars have titles.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...controller.trace.history import History
from ...controller.trace.operations import Operation
from ...wire.ranks import format_ranks
from .svg import ticks
from .tables import format_time

_MAX_RANKS = 64
_TEXT_COLUMNS = 72
# Colours of collectives, in order of their total time.
_COLOURS = ("#4c8fd0", "#f08c2e", "#58a55c", "#d9534f", "#a779c9", "#3fb5ad", "#c9a227", "#b07a5e")
_INK, _LATE, _BUSY, _PALE = "#222222", "#b3261e", ".45", ".35"
_WIDTH, _LEFT, _ROW, _LINE, _BAR, _BAR_HEIGHT = 800, 62, 40, 16, 18, 14
_INSIDE = _WIDTH - _LEFT - 22
_MANY = 16  # number of rows from which on they are lower
_MAX_MARK, _MAX_LEGEND, _TICKS = 24, 4, 6
# Limits of a picture, which is saved in the notebook's file: bytes of the SVG, and of the titles
# that are shown on hover. With too many bars, each column of some pixels shows the longest mark in
# it.
_MAX_PICTURE_BYTES, _MAX_TITLES_BYTES = 31_000, 12_000
_COLUMNS = (1, 2, 4, 8, 16, 32)
_AREA_BYTES = 55  # of an area beside its title

# Name of a collective, "" for computation; and whether the rank waits in it.
Mark = tuple[str, bool]
Span = tuple[int, int, Mark]
_COMPUTES: Mark = ("", False)


@dataclass(frozen=True)
class Row:
    """One rank's row of the drawing, with times in nanoseconds from the begin of the drawing; the
    note is drawn below the rank's name.
    """

    rank: int
    busy: Sequence[tuple[int, int]]
    bars: Sequence[Operation]
    note: str = ""

    def computing(self) -> Iterator[Span]:
        """Yield begin, end and mark of each computation."""
        return ((begin, end, _COMPUTES) for begin, end in self.busy)

    def operating(self) -> Iterator[Span]:
        """Yield begin, end and mark of each operation, split into the wait and the rest."""
        for bar in self.bars:
            middle = bar.start_ns + bar.waited_ns
            yield bar.start_ns, middle, (bar.name, True)
            yield middle, bar.end_ns, (bar.name, False)


@dataclass(frozen=True)
class Timeline:
    """The computations and operations of each rank over time.

    Attributes:
        rows: rows of the ranks.
        length_ns: time from the first rank's begin to the last one's end, in nanoseconds.
        marks: begin and title of each cell.
        left_out: a sentence on the ranks that are not drawn; "" if all are drawn.
    """

    rows: Sequence[Row]
    length_ns: int
    marks: Sequence[tuple[int, str]] = ()
    left_out: str = ""

    @cached_property
    def names(self) -> list[str]:
        """Names of the drawn collectives, by total time, the longest first."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            for bar in row.bars:
                totals[bar.name] += bar.duration_ns
        return [name for name, _ in totals.most_common()]


def timeline_of(history: History) -> Timeline:
    """Return the timeline of cells, to be drawn without the pauses between them."""
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
    left = format_ranks(history.ranks[_MAX_RANKS:])
    left_out = f"%dist_timeline --ranks {left} draws the others" if left else ""
    return Timeline(rows[:_MAX_RANKS], max(1, history.length_ns), marks, left_out)


def fill(
    spans: Iterable[Span], length_ns: int, num_columns: int, share: float = 0.25
) -> list[Mark | None]:
    """Divide an axis into equal columns, and return the mark that takes most of each; None for a
    column of which all marks together take less than `share`.

    Args:
        spans: begin, end and mark of each span.
        length_ns: length of the axis, in nanoseconds.
        num_columns: number of columns.
        share: least share of a column; 0 to show every mark.
    """
    taken: list[Counter[Mark]] = [Counter() for _ in range(num_columns)]
    width = length_ns / num_columns
    for begin, end, mark in spans:
        if end > max(begin, 0):
            last = min(num_columns - 1, int((end - 1) / width))
            for index in range(max(0, int(begin / width)), last + 1):
                inside = min(end, (index + 1) * width) - max(begin, index * width)
                taken[index][mark] += max(1, round(inside))
    return [
        max(marks, key=lambda mark: (marks[mark], mark))
        if marks and sum(marks.values()) >= share * width
        else None
        for marks in taken
    ]


# As text.


def draw_text(timeline: Timeline) -> str:
    """Draw the timeline for a terminal: a letter for each collective, in lower case while the rank
    waits in it.
    """
    letters = dict(zip(timeline.names, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    width = max((len(f"rank {row.rank}") for row in timeline.rows), default=0)
    lines = []
    for row in timeline.rows:
        spans = itertools.chain(row.computing(), row.operating())
        columns = fill(spans, timeline.length_ns, _TEXT_COLUMNS)
        drawn = "".join(" " if mark is None else _letter(mark, letters) for mark in columns)
        lines.append(f"{f'rank {row.rank}':<{width}}  {drawn}".rstrip())
    lines += filter(None, [timeline.left_out])
    legend = ["# compute", *(f"{letter} {name}" for name, letter in letters.items())]
    legend += ["small letters: waits for another rank"] if letters else []
    lines.append(f"{'':<{width}}  0 to {format_time(timeline.length_ns)}; {', '.join(legend)}")
    return "\n".join(lines)


def _letter(mark: Mark, letters: Mapping[str, str]) -> str:
    letter = "#" if mark == _COMPUTES else letters.get(mark[0], "?")
    return letter.lower() if mark[1] else letter


# As a picture.


def draw_html(timeline: Timeline) -> str:
    """Draw the timeline as an ``<img>``, which pages that remove inline SVG still show.

    An image map has the titles of the collectives, as browsers show no titles of an SVG in an
    ``<img>``.
    """
    picture = draw_svg(timeline)
    encoded = base64.b64encode(picture.encode()).decode()
    # Image maps share one namespace in a page.
    name = f"cellmesh-{hashlib.sha1(picture.encode(), usedforsecurity=False).hexdigest()[:12]}"
    return (
        f'<div style="overflow-x:auto"><img class="cellmesh-timeline" usemap="#{name}" '
        'alt="compute and collectives of each rank over time" '
        f'width="{_WIDTH}" height="{_Layout(timeline).height:g}" style="max-width:none" '
        f'src="data:image/svg+xml;base64,{encoded}"/><map name="{name}">'
        f"{''.join(_areas(timeline))}</map></div>{html.escape(timeline.left_out)}"
    )


def draw_svg(timeline: Timeline) -> str:
    """Draw the timeline on white, because the page's colours are unknown."""
    layout = _Layout(timeline)
    size = f'width="{_WIDTH}" height="{layout.height:g}"'
    frame = "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {layout.height:g}" '
            f'{size} font-family="sans-serif" font-size="11" fill="{_INK}">'
            f'<rect {size} rx="3" fill="#ffffff"/>',
            *layout.draw_legend(),
            *layout.draw_axis(),
            *(layout.draw_name(row, layout.y(index)) for index, row in enumerate(timeline.rows)),
        ]
    )
    for width in _COLUMNS:
        bars = layout.draw_bars(width)
        if len(frame) + len(bars) <= _MAX_PICTURE_BYTES:
            break
    return f"{frame}{bars}</svg>"


class _Layout:
    """Positions of the parts of a timeline's picture, in pixels, and the functions that draw them.

    Args:
        timeline: timeline to draw.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        # Colour and opacity of each mark.
        self._styles: dict[Mark, tuple[str, str]] = {_COMPUTES: (_INK, _BUSY)}
        for name, colour in zip(timeline.names, itertools.cycle(_COLOURS), strict=False):
            self._styles[name, True] = colour, _PALE
            self._styles[name, False] = colour, "1"
        named = [(name or "compute", self._styles[name, False]) for name in ("", *timeline.names)]
        if timeline.names:
            waits = self._styles[timeline.names[0], True]
            named.append(("pale: waits for another rank", waits))
        starts = range(0, len(named), _MAX_LEGEND)
        self._legend = [named[start : start + _MAX_LEGEND] for start in starts]
        self.scale = 1 if len(timeline.rows) <= _MANY else 0.5
        self._top = 10 + _LINE * (len(self._legend) + bool(timeline.marks))
        self.height = self.y(len(timeline.rows)) + 22

    def y(self, index: int) -> float:
        """Return the y coordinate of the top of a row."""
        return self._top + index * _ROW * self.scale

    def x(self, at_ns: float) -> float:
        """Return the x coordinate of a time."""
        inside = min(max(at_ns, 0), self._timeline.length_ns) / self._timeline.length_ns
        return _LEFT + inside * _INSIDE

    def draw_legend(self) -> Iterator[str]:
        """Yield the SVG text lines of the legend, which pairs colours with names of operations."""
        for number, line in enumerate(self._legend):
            entries = (
                f'<tspan dx="12" fill="{colour}" fill-opacity="{opacity}">■</tspan> '
                f"{html.escape(name)}"
                for name, (colour, opacity) in line
            )
            yield f'<text x="{_LEFT - 12}" y="{17 + _LINE * number}">{"".join(entries)}</text>'

    def draw_axis(self) -> Iterator[str]:
        """Yield lines at round times and at the starts of cells, with their texts."""
        foot = self.height - 18
        for at_ns in ticks(0, self._timeline.length_ns, _TICKS):
            x = self.x(at_ns)
            yield (
                f'<path d="M{x:.1f} {self._top}V{foot:g}" stroke="#dddddd"/><text x="{x:.1f}" '
                f'y="{foot + 13:g}" text-anchor="middle" fill="#666666">{format_time(at_ns)}</text>'
            )
        free_from = 0.0
        for at_ns, text in self._timeline.marks:
            x = self.x(at_ns)
            yield f'<path d="M{x:.1f} {self._top - 4}V{foot:g}" stroke="#999999"/>'
            if x >= free_from:
                short = text if len(text) <= _MAX_MARK else f"{text[: _MAX_MARK - 1]}…"
                free_from = x + 12 + 6.2 * len(short)
                yield f'<text x="{x + 3:.1f}" y="{self._top - 5}">{html.escape(short)}</text>'

    def draw_name(self, row: Row, top: float) -> str:
        """Draw a rank's name and note, and the line below its row."""
        has_note = bool(row.note) and self.scale == 1
        y = top + (22 if self.scale == 1 else 14) - 5 * has_note
        ink = f' fill="{_LATE}" font-weight="bold"' if row.note else ""
        end = f'x="{_LEFT - 8}" text-anchor="end"'
        note = f'<text {end} y="{y + 12:g}" fill="{_LATE}">{row.note}</text>' if has_note else ""
        return (
            f'<text {end} y="{y:g}"{ink}>rank {row.rank}</text>{note}'
            f'<path d="M{_LEFT} {top + (_ROW - 3) * self.scale:g}H{_WIDTH}" stroke="#e6e6e6"/>'
        )

    def draw_bars(self, width: int) -> str:
        """Draw the activity of ranks in columns of `width` pixels, as one path for each mark."""
        share = 0 if width == 1 else 0.25
        moves: dict[Mark, str] = dict.fromkeys(self._styles, "")
        for index, row in enumerate(self._timeline.rows):
            top = self.y(index)
            middle = top + (_BAR + _BAR_HEIGHT / 2) * self.scale
            for y, spans in (
                (top + 10 * self.scale, row.computing()),
                (middle, row.operating()),
            ):
                columns = fill(spans, self._timeline.length_ns, _INSIDE // width, share)
                x = _LEFT
                for mark, alike in itertools.groupby(columns):
                    length = width * sum(1 for _ in alike)
                    if mark is not None:
                        moves[mark] += f"M{x} {y:g}h{length}"
                    x += length
        return "".join(
            f'<path d="{moves[mark]}" fill="none" stroke="{colour}" stroke-opacity="{opacity}" '
            f'stroke-width="{(12 if mark == _COMPUTES else _BAR_HEIGHT) * self.scale:g}"/>'
            for mark, (colour, opacity) in self._styles.items()
            if moves[mark]
        )


def _areas(timeline: Timeline) -> Iterator[str]:
    """Yield invisible areas that show a collective's name on hover, the longest collectives first,
    up to the limit of bytes.
    """
    layout = _Layout(timeline)
    bars = [(index, row, bar) for index, row in enumerate(timeline.rows) for bar in row.bars]
    left = _MAX_TITLES_BYTES
    for index, row, bar in sorted(bars, key=lambda each: -each[2].duration_ns):
        title = html.escape(_describe(row, bar))
        left -= _AREA_BYTES + len(title)
        if left < 0:
            return
        top = layout.y(index) + _BAR * layout.scale
        begin, end = layout.x(bar.start_ns), layout.x(bar.end_ns)
        corners = (begin, top, max(end, begin + 2), top + _BAR_HEIGHT * layout.scale)
        coordinates = ",".join(f"{each:.0f}" for each in corners)
        yield f'<area shape="rect" coords="{coordinates}" title="{title}"/>'


def _describe(row: Row, bar: Operation) -> str:
    members = f" of ranks {format_ranks(list(bar.members))}" if bar.members else ""
    took = f"{'goes on for ' if bar.is_open else ''}{format_time(bar.duration_ns)}"
    late = f"rank {bar.last}" if bar.last >= 0 else "another rank"
    waits = f", {format_time(bar.waited_ns)} of it waiting for {late}" if bar.waited_ns else ""
    return f"rank {row.rank}: {bar.name}{members}, {took}{waits}"
