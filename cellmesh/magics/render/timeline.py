"""Draws cells and collectives over time, a row for each rank, as SVG or text. Pure."""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...controller.trace.history import History
from ...controller.trace.operations import Operation
from ...controller.trace.profile import Profile
from ...wire.ranks import format_ranks

# Of collectives, those that took longest first.
COLOURS = ("#4c8fd0", "#f08c2e", "#58a55c", "#d9534f", "#a779c9", "#3fb5ad", "#c9a227", "#b07a5e")
_INK, _BUSY, _PALE = "#222222", ".45", ".35"
_WIDTH, _LEFT, _ROW, _LINE, _BAR, _BAR_HEIGHT = 800.0, 62.0, 40.0, 16, 18.0, 14.0
_MAX_TITLES = 300  # of a rank, beyond which hovering tells nothing
_TICKS = 6
_MANY = 16  # rows; from here on they are lower
_MAX_MARK = 24
_LATE = "#b3261e"
_TEXT_COLUMNS = 72


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
    """The operators and collectives of each rank over time; shows itself as a picture or text.

    Attributes:
        rows: one a rank.
        length_ns: from the first rank's begin to the last one's end.
        busy_name: what a rank does where it is busy.
        marks: when something begins, and what.
    """

    rows: Sequence[Row]
    length_ns: int
    busy_name: str = "operators"
    marks: Sequence[tuple[int, str]] = ()

    @property
    def names(self) -> list[str]:
        """The names of the drawn collectives, those with the longest total time first."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            for bar in row.bars:
                totals[bar.name] += bar.end_ns - bar.start_ns
        return [name for name, _ in totals.most_common()]

    def __repr__(self) -> str:
        return draw_text(self)

    def _repr_html_(self) -> str:
        return draw_html(self)


def timeline_of(profile: Profile) -> Timeline:
    """Return the timeline of a profile, to be drawn."""
    start = profile.start_ns
    rows = []
    for rank, ours in profile.operations.items():
        busy = profile.by_rank[rank].busy
        spans = [(begin - start, begin - start + took) for begin, took in busy]
        rows.append(Row(rank, spans, ours))
    return Timeline(rows, max(1, round(profile.took_s * 1e9)))


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
    return Timeline(rows, max(1, history.length_ns), "compute", marks)


# ---- SVG


def draw_html(timeline: Timeline) -> str:
    """Draw the timeline as an ``<img>``, which pages that remove inline SVG still show.

    Hovering over a collective tells what it was; an image map does that, as SVG in an ``<img>``
    does not.
    """
    picture = draw_svg(timeline)
    encoded = base64.b64encode(picture.encode()).decode()
    areas = "".join(_areas(timeline))
    # Maps have one namespace in a page.
    name = f"cellmesh-{hashlib.sha1(picture.encode(), usedforsecurity=False).hexdigest()[:12]}"
    height = _height(timeline)
    return (
        f'<div style="overflow-x:auto"><img class="cellmesh-timeline" usemap="#{name}" '
        f'alt="{timeline.busy_name} and collectives of each rank over time" '
        f'width="{_WIDTH:g}" height="{height:g}" style="max-width:none" '
        f'src="data:image/svg+xml;base64,{encoded}"/>'
        f'<map name="{name}">{areas}</map></div>'
    )


def draw_svg(timeline: Timeline) -> str:
    """Draw the timeline on white, because the page's colours are unknown."""
    colours = colours_of(timeline.names)
    height = _height(timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'width="{_WIDTH:g}" height="{height:g}" font-family="sans-serif" font-size="11" '
        f'fill="{_INK}"><rect width="{_WIDTH:g}" height="{height:g}" rx="3" fill="#ffffff"/>'
    ]
    parts += _draw_legend(timeline, colours)
    parts += _draw_axis(timeline)
    for index, row in enumerate(timeline.rows):
        parts += _draw_row(timeline, row, _top(timeline) + index * _row(timeline), colours)
    return f"{''.join(parts)}</svg>"


def colours_of(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _legend(
    timeline: Timeline, colours: Mapping[str, str]
) -> list[list[tuple[float, str, str, str]]]:
    """Return the entries of the legend, by line; each is x, name, colour and opacity."""
    entries = [
        (timeline.busy_name, _INK, _BUSY),
        *((name, colour, "1") for name, colour in colours.items()),
    ]
    if colours:
        entries.append(("pale: waits for another rank", next(iter(colours.values())), _PALE))
    lines: list[list[tuple[float, str, str, str]]] = [[]]
    x = _LEFT
    for name, colour, opacity in entries:
        width = 30 + 6.2 * len(name)  # about what it takes
        if lines[-1] and x + width > _WIDTH:
            lines.append([])
            x = _LEFT
        lines[-1].append((x, name, colour, opacity))
        x += width
    return lines


def _top(timeline: Timeline) -> float:
    marks = _LINE if timeline.marks else 0
    return 10 + marks + _LINE * len(_legend(timeline, colours_of(timeline.names)))


def _height(timeline: Timeline) -> float:
    return _top(timeline) + _row(timeline) * len(timeline.rows) + 22


def _row(timeline: Timeline) -> float:
    """Return the height of a rank's row in pixels; less if there are many ranks."""
    return _ROW if len(timeline.rows) <= _MANY else _ROW / 2


def _draw_legend(timeline: Timeline, colours: Mapping[str, str]) -> Iterable[str]:
    for number, line in enumerate(_legend(timeline, colours)):
        y = 8 + _LINE * number
        for x, name, colour, opacity in line:
            yield (
                f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{colour}" '
                f'fill-opacity="{opacity}"/><text x="{x + 14:.0f}" '
                f'y="{y + 9}">{html.escape(name)}</text>'
            )


def _draw_axis(timeline: Timeline) -> Iterable[str]:
    height = _height(timeline)
    for at_ns in ticks(timeline.length_ns):
        x = _x(timeline, at_ns)
        yield (
            f'<path d="M{x:.1f} {_top(timeline):g}V{height - 18:g}" stroke="#dddddd" fill="none"/>'
            f'<text x="{x:.1f}" y="{height - 5:g}" text-anchor="middle" fill="#666666">'
            f"{format_time(at_ns)}</text>"
        )
    free_from = 0.0
    for at_ns, text in timeline.marks:
        x = _x(timeline, at_ns)
        yield (
            f'<path d="M{x:.1f} '
            f'{_top(timeline) - 4:g}V{height - 18:g}" '
            'stroke="#999999" fill="none"/>'
        )
        if x >= free_from:
            short = text if len(text) <= _MAX_MARK else f"{text[: _MAX_MARK - 1]}…"
            free_from = x + 12 + 6.2 * len(short)
            yield f'<text x="{x + 3:.1f}" y="{_top(timeline) - 5:g}">{html.escape(short)}</text>'


def _draw_row(
    timeline: Timeline, row: Row, top: float, colours: Mapping[str, str]
) -> Iterable[str]:
    size = _row(timeline) / _ROW
    bar, bar_height, foot = top + _BAR * size, _BAR_HEIGHT * size, top + (_ROW - 3) * size
    y = top + (22 if size == 1 else 14) - (5 if row.note and size == 1 else 0)
    ink = f' fill="{_LATE}" font-weight="bold"' if row.note else ""
    yield f'<text x="{_LEFT - 8:g}" y="{y:g}" text-anchor="end"{ink}>rank {row.rank}</text>'
    if row.note and size == 1:
        yield (
            f'<text x="{_LEFT - 8:g}" y="{y + 12:g}" '
            f'text-anchor="end" fill="{_LATE}">{row.note}</text>'
        )
    yield f'<path d="M{_LEFT:g} {foot:g}H{_WIDTH:g}" stroke="#e6e6e6" fill="none"/>'
    yield _path(_spans(timeline, row.busy), top + 4 * size, 12 * size, _INK, _BUSY)
    for name, colour in colours.items():
        ours = [bar for bar in row.bars if bar.name == name]
        waits = [(bar.start_ns, bar.start_ns + bar.waited_ns) for bar in ours]
        rest = [(bar.start_ns + bar.waited_ns, bar.end_ns) for bar in ours]
        yield _path(_spans(timeline, waits), bar, bar_height, colour, _PALE)
        yield _path(_spans(timeline, rest), bar, bar_height, colour, "1")


def _areas(timeline: Timeline) -> Iterable[str]:
    """Yield invisible SVG areas that show a collective's name on hover; none for a rank with very
    many collectives.
    """
    for index, row in enumerate(timeline.rows):
        if len(row.bars) > _MAX_TITLES:
            continue
        size = _row(timeline) / _ROW
        top = _top(timeline) + index * _row(timeline) + _BAR * size
        for bar in row.bars:
            begin, end = _x(timeline, bar.start_ns), _x(timeline, bar.end_ns)
            corners = (
                f"{begin:.0f},{top:.0f},{max(end, begin + 2):.0f},{top + _BAR_HEIGHT * size:.0f}"
            )
            yield (
                f'<area shape="rect" coords="{corners}" '
                f'title="{html.escape(_describe(row, bar))}"/>'
            )


def _describe(row: Row, bar: Operation) -> str:
    members = f" of ranks {format_ranks(list(bar.members))}" if bar.members else ""
    waiting = (
        f", {format_time(bar.waited_ns)} of it waiting for another rank" if bar.waited_ns else ""
    )
    return (
        f"rank {row.rank}: {bar.name}{members}, {format_time(bar.end_ns - bar.start_ns)}{waiting}"
    )


def _spans(timeline: Timeline, intervals: Iterable[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return intervals as (x, width) in pixels, widened to be visible, joined where they touch."""
    joined: list[list[float]] = []
    for start_ns, end_ns in intervals:
        if end_ns <= start_ns:
            continue
        begin, end = _x(timeline, start_ns), _x(timeline, end_ns)
        end = max(end, begin + 0.6)
        if joined and begin - joined[-1][1] < 0.3:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    return [(begin, end - begin) for begin, end in joined]


def _path(
    spans: Sequence[tuple[float, float]], top: float, height: float, colour: str, opacity: str
) -> str:
    if not spans:
        return ""
    moves = "".join(f"M{x:.1f} {top:g}h{width:.1f}v{height:g}h-{width:.1f}z" for x, width in spans)
    return f'<path d="{moves}" fill="{colour}" fill-opacity="{opacity}"/>'


def _x(timeline: Timeline, at_ns: int) -> float:
    inside = min(max(at_ns, 0), timeline.length_ns) / timeline.length_ns
    return _LEFT + inside * (_WIDTH - _LEFT - 22)


def ticks(length_ns: int) -> list[int]:
    """Return about six round times from 0 on, for the axis."""
    step = 1
    while length_ns / step > _TICKS:
        for factor in (2, 5, 10):
            if length_ns / (step * factor) <= _TICKS:
                return list(range(0, length_ns + 1, step * factor))
        step *= 10
    return list(range(0, length_ns + 1, step))


def format_time(ns: float) -> str:
    """Format nanoseconds: ``12 µs``, ``3.4 ms``, ``1.25 s``."""
    if ns == 0:
        return "0"
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


# ---- text


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
    lines.append(f"{'':<{width}}  0 to {format_time(timeline.length_ns)}; {', '.join(legend)}")
    return "\n".join(lines)


def _text_row(timeline: Timeline, row: Row, letters: Mapping[str, str]) -> str:
    cells: list[Counter[str]] = [Counter() for _ in range(_TEXT_COLUMNS)]
    for start_ns, end_ns in row.busy:
        _cover(cells, timeline.length_ns, start_ns, end_ns, "#")
    for bar in row.bars:
        letter = letters.get(bar.name, "?")
        middle = bar.start_ns + bar.waited_ns
        _cover(cells, timeline.length_ns, bar.start_ns, middle, letter.lower())
        _cover(cells, timeline.length_ns, middle, bar.end_ns, letter)
    column_ns = timeline.length_ns / _TEXT_COLUMNS
    return "".join(
        max(cell, key=lambda mark: (cell[mark], mark))
        if sum(cell.values()) >= column_ns / 4
        else " "
        for cell in cells
    ).rstrip()


def _cover(
    cells: list[Counter[str]], length_ns: int, start_ns: int, end_ns: int, mark: str
) -> None:
    column_ns = length_ns / len(cells)
    first = max(0, int(start_ns / column_ns))
    last = min(len(cells) - 1, int(max(0, end_ns - 1) / column_ns))
    for index in range(first, last + 1):
        covered = min(end_ns, (index + 1) * column_ns) - max(start_ns, index * column_ns)
        if covered > 0:
            cells[index][mark] += int(covered)
