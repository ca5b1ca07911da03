"""Draws cells and collectives over time, a row for each rank, as SVG or text. Pure."""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from ...controller.trace.history import History
from ...controller.trace.operations import Operation
from ...controller.trace.profile import Profile
from ...wire.ranks import format_ranks
from .time_axis import cover, format_time, ticks
from .timeline_text import draw_text

# Of collectives, those that took longest first.
COLOURS = ("#4c8fd0", "#f08c2e", "#58a55c", "#d9534f", "#a779c9", "#3fb5ad", "#c9a227", "#b07a5e")
_INK, _BUSY, _PALE = "#222222", ".45", ".35"
_WIDTH, _LEFT, _ROW, _LINE, _BAR, _BAR_HEIGHT = 800.0, 62.0, 40.0, 16, 18.0, 14.0
# A picture stays in the notebook's file: bytes of the SVG, and of what hovering shows. Where bars
# are too many, each column of so many pixels shows what took most of it.
_MAX_PICTURE_BYTES, _MAX_TITLES_BYTES = 31_000, 12_000
_COLUMNS = (2, 4, 8)
# Of more ranks those are drawn that differ most from the others; so, too, if there is no room.
_MAX_RANKS, _NUM_DIFFERENT, _MIN_RANKS = 64, 16, 4
_MANY = 16  # rows; from here on they are lower
_MAX_MARK = 24
_LATE = "#b3261e"
_AREA_BYTES = 55  # of an area beside its title


@dataclass(frozen=True)
class Row:
    """One rank's row of the drawing, in nanoseconds from its begin; the note stands below the
    rank's name.
    """

    rank: int
    busy: Sequence[tuple[int, int]]
    bars: Sequence[Operation]
    note: str = ""


# A collective's name, None for what a rank was busy with; and whether it waits.
_What = tuple[str | None, bool]
_Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class _Layer:
    """All bars of one colour: by row, its middle and the spans in it, in pixels."""

    colour: str
    opacity: str
    height: float
    rows: list[tuple[float, _Spans]] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    """The operators and collectives of each rank over time; shows itself as a picture or text.

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
    return _with_few(timeline, _NUM_DIFFERENT) if many else timeline


def _with_few(timeline: Timeline, num_ranks: int) -> Timeline:
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


# ---- SVG


def draw_html(timeline: Timeline) -> str:
    """Draw the timeline as an ``<img>``, which pages that remove inline SVG still show.

    Hovering over a collective tells what it was; an image map does that, as SVG in an ``<img>``
    does not.
    """
    picture = draw_svg(timeline)
    while len(picture) > _MAX_PICTURE_BYTES and len(timeline.rows) > _MIN_RANKS:
        timeline = _with_few(timeline, max(_MIN_RANKS, len(timeline.rows) // 2))
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
        f'<map name="{name}">{areas}</map></div>{html.escape(timeline.left_out)}'
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
    top = _top(timeline)
    for index, row in enumerate(timeline.rows):
        parts += _draw_row(timeline, row, top + index * _row(timeline))
    left = _MAX_PICTURE_BYTES - sum(map(len, parts))
    for width in (0, *_COLUMNS):
        drawn = "".join(map(_path, _layers(timeline, colours, width)))
        if len(drawn) <= left:
            break
    return f"{''.join(parts)}{drawn}</svg>"


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


def _draw_row(timeline: Timeline, row: Row, top: float) -> Iterable[str]:
    size = _row(timeline) / _ROW
    foot = top + (_ROW - 3) * size
    y = top + (22 if size == 1 else 14) - (5 if row.note and size == 1 else 0)
    ink = f' fill="{_LATE}" font-weight="bold"' if row.note else ""
    yield f'<text x="{_LEFT - 8:g}" y="{y:g}" text-anchor="end"{ink}>rank {row.rank}</text>'
    if row.note and size == 1:
        yield (
            f'<text x="{_LEFT - 8:g}" y="{y + 12:g}" '
            f'text-anchor="end" fill="{_LATE}">{row.note}</text>'
        )
    yield f'<path d="M{_LEFT:g} {foot:g}H{_WIDTH:g}" stroke="#e6e6e6"/>'


def _layers(timeline: Timeline, colours: Mapping[str, str], width: int) -> list[_Layer]:
    """Return what is drawn in the rows, of each colour; with a width, in columns of that."""
    size, top = _row(timeline) / _ROW, _top(timeline)
    bar_height = _BAR_HEIGHT * size
    busy = _Layer(_INK, _BUSY, 12 * size)
    waits = {name: _Layer(colour, _PALE, bar_height) for name, colour in colours.items()}
    rests = {name: _Layer(colour, "1", bar_height) for name, colour in colours.items()}
    for index, row in enumerate(timeline.rows):
        y = top + index * _row(timeline)
        middle = y + _BAR * size + bar_height / 2
        found = _columns(timeline, row, width) if width else _bars(timeline, row)
        for (name, is_waiting), spans in found.items():
            if name is None:
                busy.rows.append((y + 10 * size, spans))
            else:
                (waits if is_waiting else rests)[name].rows.append((middle, spans))
    return [busy, *(layer for name in colours for layer in (waits[name], rests[name]))]


def _areas(timeline: Timeline) -> Iterable[str]:
    """Yield invisible SVG areas that show a collective's name on hover, of as many as there is room
    for: the longest.
    """
    size, above = _row(timeline) / _ROW, _top(timeline)
    bars = [(index, row, bar) for index, row in enumerate(timeline.rows) for bar in row.bars]
    shortest_ns, left = 0, _MAX_TITLES_BYTES
    for _, row, bar in sorted(bars, key=lambda each: each[2].start_ns - each[2].end_ns):
        left -= _AREA_BYTES + len(_describe(row, bar))
        if left < 0:
            shortest_ns = bar.end_ns - bar.start_ns + 1
            break
    for index, row in enumerate(timeline.rows):
        top = above + index * _row(timeline) + _BAR * size
        for bar in row.bars:
            if bar.end_ns - bar.start_ns < shortest_ns:
                continue
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


def _bars(timeline: Timeline, row: Row) -> dict[_What, _Spans]:
    """Return what a rank did, and the spans of each, in pixels."""
    found: dict[_What, list[tuple[int, int]]] = {(None, False): list(row.busy)}
    for bar in row.bars:
        middle = bar.start_ns + bar.waited_ns
        found.setdefault((bar.name, True), []).append((bar.start_ns, middle))
        found.setdefault((bar.name, False), []).append((middle, bar.end_ns))
    return {what: _join(timeline, intervals) for what, intervals in found.items()}


def _join(timeline: Timeline, intervals: Iterable[tuple[int, int]]) -> _Spans:
    """Return intervals as (begin, end) in pixels, widened to be visible, joined where they begin in
    the same pixel or touch.
    """
    joined: _Spans = []
    for start_ns, end_ns in intervals:
        if end_ns <= start_ns:
            continue
        begin, end = _x(timeline, start_ns), _x(timeline, end_ns)
        end = max(end, begin + 0.6)
        if joined and (begin - joined[-1][1] < 0.3 or begin - joined[-1][0] < 1):
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _columns(timeline: Timeline, row: Row, width: int) -> dict[_What, _Spans]:
    """Return what took most of each column of the picture that is so wide, and the spans of it."""
    num_columns = int((_x(timeline, timeline.length_ns) - _LEFT) / width)
    busy: list[Counter[_What]] = [Counter() for _ in range(num_columns)]
    bars: list[Counter[_What]] = [Counter() for _ in range(num_columns)]
    for start_ns, end_ns in row.busy:
        cover(busy, timeline.length_ns, start_ns, end_ns, (None, False))
    for bar in row.bars:
        middle = bar.start_ns + bar.waited_ns
        cover(bars, timeline.length_ns, bar.start_ns, middle, (bar.name, True))
        cover(bars, timeline.length_ns, middle, bar.end_ns, (bar.name, False))
    column_ns = timeline.length_ns / num_columns
    found: dict[_What, _Spans] = {}
    for cells in (busy, bars):
        before: _What | None = None
        for index, cell in enumerate(cells):
            is_much = sum(cell.values()) >= column_ns / 4
            what = max(cell, key=lambda each: cell[each]) if is_much else None
            begin = _LEFT + index * width
            if what is not None and what == before:
                found[what][-1] = found[what][-1][0], begin + width
            elif what is not None:
                found.setdefault(what, []).append((begin, begin + width))
            before = what
    return found


def _path(layer: _Layer) -> str:
    moves = "".join(
        f"M{begin:.1f} {y:g}h{end - begin:.1f}" for y, spans in layer.rows for begin, end in spans
    ).replace(".0", "")
    if not moves:
        return ""
    return (
        f'<path d="{moves}" fill="none" stroke="{layer.colour}" stroke-opacity="{layer.opacity}" '
        f'stroke-width="{layer.height:g}"/>'
    )


def _x(timeline: Timeline, at_ns: int) -> float:
    inside = min(max(at_ns, 0), timeline.length_ns) / timeline.length_ns
    return _LEFT + inside * (_WIDTH - _LEFT - 22)
