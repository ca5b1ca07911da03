"""A plot that stands still: SVG in an ``<img>``. Pure."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence

from ...controller.metrics import Series
from ...controller.metrics_plot import Plot, band, how_to, thin
from ...wire.ranks import format_ranks
from .palette import colour_of

_WIDTH, _HEIGHT = 560, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 22, 26
_INK, _GRID = "#333333", "#e3e3e3"
_MAX_LEGEND = 8
# Of larger numbers differences could not be had: they are drawn at this height.
_MOST = 1e300
# A shorter scale has no room for ticks, as floats lie on it.
_LEAST_SHARE, _LEAST_SPAN = 1e-12, 1e-290


def draw_html(plot: Plot) -> str:
    """All panels, one below the other."""
    return "".join(_panel(plot, name) for name in plot.names)


def _panel(plot: Plot, name: str) -> str:
    series = plot.series(name)
    title = html.escape(name)
    if not any(series.values()) or not _finite(series):
        return f"<div><b>{title}</b>: nothing to draw yet: {html.escape(how_to(name))}</div>"
    encoded = base64.b64encode(draw_svg(name, series, plot.mean).encode()).decode()
    points = sum(len(one.values) for one in series.values())
    alt = f"{name}, ranks {format_ranks(tuple(series))}, {points} points"
    return (
        f'<img class="cellmesh-plot" width="{_WIDTH}" height="{_HEIGHT}" '
        'style="display:block;max-width:100%;height:auto" '
        f'alt="{html.escape(alt, quote=True)}" src="data:image/svg+xml;base64,{encoded}"/>'
    )


def draw_svg(name: str, series: Mapping[int, Series], mean: bool) -> str:
    """One panel, on a white ground: it cannot know the colours of the page that shows it."""
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

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="10" '
        f'fill="{_INK}"><rect width="{_WIDTH}" height="{_HEIGHT}" rx="3" fill="#ffffff"/><text '
        f'x="{_LEFT}" y="14" font-size="11" font-weight="bold">{html.escape(name)}</text>'
    ]
    for value in ticks(low_y, high_y, 4):
        y = y_of(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{value:.4g}</text>')
    for step in ticks(low_x, high_x, 6):
        parts.append(
            f'<text x="{x_of(step):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{step:.6g}</text>'
        )
    if mean:
        one = band(series)
        top, bottom = (
            list(zip(one.steps, one.most, strict=True)),
            list(zip(one.steps, one.least, strict=True)),
        )
        outline = " ".join(
            f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in top + bottom[::-1] if math.isfinite(y)
        )
        parts.append(f'<polygon points="{outline}" fill="{colour_of(0, 1)}" fill-opacity=".2"/>')
        parts.append(_line(Series(one.steps, one.mean), colour_of(0, 1), x_of, y_of))
    else:
        count = max(series) + 1
        parts += [
            _line(thin(one), colour_of(rank, count), x_of, y_of) for rank, one in series.items()
        ]
        parts.append(_legend(tuple(series), count))
    return "".join([*parts, "</svg>"])


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
    return (
        f'<path d="{"".join(pieces)}" fill="none" stroke="{colour}" stroke-width="1.5" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )


def _legend(ranks: Sequence[int], num_ranks: int) -> str:
    if len(ranks) > _MAX_LEGEND:
        return (
            f'<text x="{_WIDTH - _RIGHT}" y="14" '
            'text-anchor="end">ranks '
            f"{format_ranks(tuple(ranks))}</text>"
        )
    pieces, x = [], _WIDTH - _RIGHT
    for rank in reversed(ranks):
        text = f"rank {rank}"
        pieces.append(f'<text x="{x}" y="14" text-anchor="end">{text}</text>')
        x -= 6 * len(text) + 4
        pieces.append(
            f'<path d="M{x - 10} 10.5h9" stroke="{colour_of(rank, num_ranks)}" stroke-width="2"/>'
        )
        x -= 18
    return "".join(pieces)


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
    """Round numbers from `low` to `high`, about `count` of them."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(
        (step * factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= count),
        step * 10,
    )
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
