"""Draws a plot of logged numbers as SVG in an ``<img>``, without a widget. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from ...controller.metrics import (
    MAX_DRAWN,
    Plot,
    Series,
    band,
    describe_nans,
    first_nan,
    how_to,
    thin,
)
from ...wire.ranks import format_ranks
from .svg import colour_of, drawing, element, image

_WIDTH, _HEIGHT = 560, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 22, 26
_INK, _GRID, _BAD = "#333333", "#e3e3e3", "#c62828"
_MAX_LEGEND = 8
# A picture stays in the notebook's file: points of all its lines, of 15 bytes each.
_MAX_POINTS, _LEAST_PIECES = 2_800, 4
# Of larger numbers differences could not be had: they are drawn at this height.
_MOST = 1e300
# A shorter scale has no room for ticks, as floats lie on it.
_LEAST_SHARE, _LEAST_SPAN = 1e-12, 1e-290


def draw_html(plot: Plot) -> str:
    """Draw all panels of a plot, one below the other."""
    return "".join(_panel(plot, name, _MAX_POINTS // len(plot.names)) for name in plot.names)


def _panel(plot: Plot, name: str, max_points: int) -> str:
    series = plot.series(name)
    title = html.escape(name)
    nans = describe_nans(series)
    if not any(series.values()) or not _finite(series):
        why = f": {nans}" if nans else f" yet: {html.escape(how_to(name))}"
        return f"<div><b>{title}</b>: nothing to draw{why}</div>"
    points = sum(len(one.values) for one in series.values())
    alt = f"{name}, ranks {format_ranks(tuple(series))}, {points} points"
    alt += f"; {nans}" if nans else ""
    picture = draw_svg(name, series, plot.mean, max_points)
    return image(picture, alt, _WIDTH, _HEIGHT, css_class="cellmesh-plot")


def draw_svg(
    name: str, series: Mapping[int, Series], mean: bool, max_points: int = _MAX_POINTS
) -> str:
    """Draw one panel of a plot on white, because the page's colours are unknown, with about so many
    points in all.
    """
    limit = min(MAX_DRAWN, 2 * max(_LEAST_PIECES, max_points // (2 * (3 if mean else len(series)))))
    finite = _finite(series)
    low_x, high_x = _widen(min(x for x, _ in finite), max(x for x, _ in finite), 0.0)
    low_y, high_y = _widen(min(y for _, y in finite), max(y for _, y in finite), 0.05)

    def x_of(step: float) -> float:
        return _LEFT + (_bounded(step) - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return (
            _HEIGHT
            - _BOTTOM
            - (_bounded(value) - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        )

    bold = {"font_size": 11, "font_weight": "bold"}
    parts = [
        element("rect", width=_WIDTH, height=_HEIGHT, rx=3, fill="#ffffff"),
        element("text", html.escape(name), x=_LEFT, y=14, **bold),
    ]
    for value in ticks(low_y, high_y, 4):
        y = y_of(value)
        parts.append(element("path", d=f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}", stroke=_GRID))
        parts.append(_text(f"{value:.4g}", _LEFT - 6, y + 3, "end"))
    for step in ticks(low_x, high_x, 6):
        parts.append(_text(f"{step:.6g}", x_of(step), _HEIGHT - 10, "middle"))
    if mean:
        one, colour = band(series), colour_of(0, 1)
        top, bottom = (
            list(zip(edge.steps, edge.values, strict=True))
            for edge in (
                thin(Series(one.steps, one.most), limit),
                thin(Series(one.steps, one.least), limit),
            )
        )
        outline = " ".join(
            f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in top + bottom[::-1] if math.isfinite(y)
        )
        parts.append(element("polygon", points=outline, fill=colour, fill_opacity=0.2))
        parts.append(_line(thin(Series(one.steps, one.mean), limit), colour, x_of, y_of))
    else:
        count = max(series) + 1
        parts += [
            _line(thin(one, limit), colour_of(rank, count), x_of, y_of)
            for rank, one in series.items()
        ]
        parts += [_cross(one, colour_of(rank, count), x_of) for rank, one in series.items()]
        parts += _legend(tuple(series), count)
    if nans := describe_nans(series):
        place = {"x": _WIDTH - _RIGHT, "y": _HEIGHT - _BOTTOM - 5, "text_anchor": "end"}
        parts.append(element("text", nans, fill=_BAD, **place))
    font = {"font_family": "sans-serif", "font_size": 10, "fill": _INK}
    return drawing(_WIDTH, _HEIGHT, *parts, width=_WIDTH, height=_HEIGHT, **font)


def _cross(series: Series, colour: str, x_of: Callable[[float], float]) -> str:
    """Mark where a line becomes NaN, at the upper edge: at that step nothing else is drawn."""
    first = first_nan(series)
    if first is None or not math.isfinite(series.steps[first]):
        return ""
    path = f"M{x_of(series.steps[first]) - 4:.1f} {_TOP}l8 8m0 -8l-8 8"
    return element("path", d=path, fill="none", stroke=colour, stroke_width=2)


def _line(
    series: Series, colour: str, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> str:
    pieces: list[str] = []
    pen = "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value) and math.isfinite(step):
            pieces.append(f"{pen}{x_of(step):.1f} {y_of(value):.1f}")
            pen = "L"
        else:  # a gap
            pen = "M"
    if len(pieces) == 1:
        pieces.append("h.1")
    round_ends = {"stroke_linejoin": "round", "stroke_linecap": "round"}
    path = "".join(pieces)
    return element("path", d=path, fill="none", stroke=colour, stroke_width=1.5, **round_ends)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _legend(ranks: Sequence[int], num_ranks: int) -> list[str]:
    x = _WIDTH - _RIGHT
    if len(ranks) > _MAX_LEGEND:
        return [_text(f"ranks {format_ranks(tuple(ranks))}", x, 14, "end")]
    pieces = []
    for rank in reversed(ranks):
        text = f"rank {rank}"
        pieces.append(_text(text, x, 14, "end"))
        x -= 6 * len(text) + 4
        colour = colour_of(rank, num_ranks)
        pieces.append(element("path", d=f"M{x - 10} 10.5h9", stroke=colour, stroke_width=2))
        x -= 18
    return pieces


def _finite(series: Mapping[int, Series]) -> list[tuple[float, float]]:
    points = (point for one in series.values() for point in zip(one.steps, one.values, strict=True))
    return [(_bounded(x), _bounded(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _bounded(number: float) -> float:
    return max(-_MOST, min(number, _MOST))


def _widen(low: float, high: float, share: float) -> tuple[float, float]:
    size = max(abs(low), abs(high))
    if high - low <= max(size * _LEAST_SHARE, _LEAST_SPAN):
        half = size / 2 if size > _LEAST_SPAN else 0.5
        return low - half, high + half
    return low - (high - low) * share, high + (high - low) * share


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`, for an axis."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(
        (step * factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= count),
        step * 10,
    )
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
