"""Draws a plot of logged numbers as SVG in an ``<img>``, without a widget: a line for each rank."""

from __future__ import annotations

import html
from collections.abc import Mapping

from ...controller.metrics import MAX_DRAWN, Plot, Series, describe_nans, how_to, thin
from ...wire.ranks import format_ranks
from .svg import colour_of, drawing, element, image, ticks

_WIDTH, _HEIGHT = 560, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 22, 26
_INK, _GRID, _BAD = "#333333", "#e3e3e3", "#c62828"
_MAX_LEGEND = 8
# Limits of a picture, which is saved in the notebook's file: points of all its lines, 15 bytes
# each.
_MAX_POINTS, _LEAST_PIECES = 2_800, 4
# Larger numbers are drawn as a gap: their differences overflow.
_MOST = 1e300
# A shorter scale has no room for ticks, as it contains too few floats.
_LEAST_SHARE, _LEAST_SPAN = 1e-12, 1e-290


def draw_html(plot: Plot) -> str:
    """Draw all panels of a plot, one below the other."""
    return "".join(_panel(plot, name, _MAX_POINTS // len(plot.names)) for name in plot.names)


def _panel(plot: Plot, name: str, max_points: int) -> str:
    series = plot.series(name)
    nans = describe_nans(series)
    if not any(_drawable(one) for one in series.values()):
        why = f": {nans}" if nans else f" yet: {html.escape(how_to(name))}"
        return f"<div><b>{html.escape(name)}</b>: nothing to draw{why}</div>"
    points = sum(len(one.values) for one in series.values())
    alt = f"{name}, ranks {format_ranks(tuple(series))}, {points} points"
    alt += f"; {nans}" if nans else ""
    picture = draw_svg(name, series, max_points)
    return image(picture, alt, _WIDTH, _HEIGHT, css_class="cellmesh-plot")


def draw_svg(name: str, series: Mapping[int, Series], max_points: int = _MAX_POINTS) -> str:
    """Draw one panel of a plot with at most about `max_points` points, on white, because the page's
    colours are unknown.
    """
    points = [point for one in series.values() for point in _drawable(one)]
    low_x, high_x = _widen([x for x, _ in points], 0.0)
    low_y, high_y = _widen([y for _, y in points], 0.05)

    def x_of(step: float) -> float:
        return _LEFT + (step - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        share = (value - low_y) / (high_y - low_y)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        element("rect", width=_WIDTH, height=_HEIGHT, rx=3, fill="#ffffff"),
        element("text", html.escape(name), x=_LEFT, y=14, font_size=11, font_weight="bold"),
    ]
    for value in ticks(low_y, high_y, 4):
        y = y_of(value)
        parts.append(element("path", d=f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}", stroke=_GRID))
        parts.append(_text(f"{value:.4g}", _LEFT - 6, y + 3, "end"))
    for step in ticks(low_x, high_x, 6):
        parts.append(_text(f"{step:.6g}", x_of(step), _HEIGHT - 10, "middle"))
    limit = min(MAX_DRAWN, 2 * max(_LEAST_PIECES, max_points // (2 * len(series))))
    x = _WIDTH - _RIGHT
    for rank, one in sorted(series.items(), reverse=True):
        path, few = "", thin(one, limit)
        pen = "M"
        for step, value in zip(few.steps, few.values, strict=True):
            if _is_drawable(step, value):
                path += f"{pen}{x_of(step):.1f} {y_of(value):.1f}"
                path += "h.1" if pen == "M" else ""  # makes a single point visible
            pen = "L" if _is_drawable(step, value) else "M"
        line = {"fill": "none", "stroke": colour_of(rank, max(series) + 1), "stroke_width": 1.5}
        parts.append(element("path", d=path, stroke_linecap="round", **line))
        if len(series) <= _MAX_LEGEND:
            parts.append(_text(f"rank {rank}", x, 14, "end"))
            x -= 6 * len(f"rank {rank}") + 4
            parts.append(element("path", d=f"M{x - 10} 10.5h9", **line))
            x -= 18
    if len(series) > _MAX_LEGEND:
        parts.append(_text(f"ranks {format_ranks(tuple(series))}", x, 14, "end"))
    if nans := describe_nans(series):
        place = {"x": _WIDTH - _RIGHT, "y": _HEIGHT - _BOTTOM - 5, "text_anchor": "end"}
        parts.append(element("text", nans, fill=_BAD, **place))
    font = {"font_family": "sans-serif", "font_size": 10, "fill": _INK}
    return drawing(_WIDTH, _HEIGHT, *parts, width=_WIDTH, height=_HEIGHT, **font)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _is_drawable(step: float, value: float) -> bool:
    return abs(step) <= _MOST and abs(value) <= _MOST  # not NaN, either


def _drawable(series: Series) -> list[tuple[float, float]]:
    points = zip(series.steps, series.values, strict=True)
    return [(step, value) for step, value in points if _is_drawable(step, value)]


def _widen(numbers: list[float], share: float) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    size = max(abs(low), abs(high))
    if high - low <= max(size * _LEAST_SHARE, _LEAST_SPAN):
        half = size / 2 if size > _LEAST_SPAN else 0.5
        return low - half, high + half
    return low - (high - low) * share, high + (high - low) * share
