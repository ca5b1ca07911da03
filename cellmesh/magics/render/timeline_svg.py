"""Draws a timeline as an SVG picture, whose bars have titles. Pure."""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...controller.trace.operations import Operation
from ...wire.ranks import format_ranks
from .tables import format_time
from .timeline import Row, Timeline, cover, with_few

# Of collectives, those that took longest first.
_COLOURS = ("#4c8fd0", "#f08c2e", "#58a55c", "#d9534f", "#a779c9", "#3fb5ad", "#c9a227", "#b07a5e")
_INK, _BUSY, _PALE = "#222222", ".45", ".35"
_WIDTH, _LEFT, _ROW, _LINE, _BAR, _BAR_HEIGHT = 800.0, 62.0, 40.0, 16, 18.0, 14.0
# A picture stays in the notebook's file: bytes of the SVG, and of what hovering shows. Where bars
# are too many, each column of so many pixels shows what took most of it.
_MAX_PICTURE_BYTES, _MAX_TITLES_BYTES = 31_000, 12_000
_COLUMNS = (2, 4, 8)
# So many ranks are drawn even if there is no room.
_MIN_RANKS = 4
_MANY = 16  # rows; from here on they are lower
_MAX_MARK = 24
_LATE = "#b3261e"
_AREA_BYTES = 55  # of an area beside its title
_TICKS = 6

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


def draw_html(timeline: Timeline) -> str:
    """Draw the timeline as an ``<img>``, which pages that remove inline SVG still show.

    An image map has the title of each collective, as a browser shows no titles of SVG in an
    ``<img>``.
    """
    picture = draw_svg(timeline)
    while len(picture) > _MAX_PICTURE_BYTES and len(timeline.rows) > _MIN_RANKS:
        timeline = with_few(timeline, max(_MIN_RANKS, len(timeline.rows) // 2))
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
    colours = _colours_of(timeline.names)
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


def _colours_of(names: Sequence[str]) -> dict[str, str]:
    return {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}


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
    return 10 + marks + _LINE * len(_legend(timeline, _colours_of(timeline.names)))


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
    took = f"{'goes on for ' if bar.is_open else ''}{format_time(bar.end_ns - bar.start_ns)}"
    waiting = ""
    if bar.waited_ns:
        late = f"rank {bar.last}" if bar.last >= 0 else "another rank"
        waiting = f", {format_time(bar.waited_ns)} of it waiting for {late}"
    return f"rank {row.rank}: {bar.name}{members}, {took}{waiting}"


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


def ticks(length_ns: int) -> list[int]:
    """Return about six round times from 0 on, for the axis."""
    step = 1
    while length_ns / step > _TICKS:
        for factor in (2, 5, 10):
            if length_ns / (step * factor) <= _TICKS:
                return list(range(0, length_ns + 1, step * factor))
        step *= 10
    return list(range(0, length_ns + 1, step))
