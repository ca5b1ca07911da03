"""Round times for an axis, times in words, and the parts of an axis that a span covers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

_TICKS = 6

T = TypeVar("T", bound=Hashable)


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
