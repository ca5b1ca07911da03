"""Intervals of time as pairs of begin and end: how much they cover, joined, and without others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

# Nanoseconds, or seconds.
_Time = TypeVar("_Time", int, float)


def covered(intervals: Iterable[tuple[_Time, _Time]]) -> _Time:
    """The total time that intervals cover; overlaps count once."""
    total: _Time = 0
    for begin, end in join(intervals):
        total += end - begin
    return total


def join(intervals: Iterable[tuple[_Time, _Time]], max_gap: _Time = 0) -> list[tuple[_Time, _Time]]:
    """Intervals in order, joined where they overlap or lie no further apart than `max_gap`."""
    joined: list[tuple[_Time, _Time]] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin - joined[-1][1] <= max_gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def cut_out(
    intervals: Iterable[tuple[_Time, _Time]], holes: Iterable[tuple[_Time, _Time]]
) -> list[tuple[_Time, _Time]]:
    """Intervals without the parts that other intervals cover, in order."""
    left = []
    removed = join(holes)
    first = 0
    for begin, end in join(intervals):
        while first < len(removed) and removed[first][1] <= begin:
            first += 1
        at = first
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > begin:
                left.append((begin, removed[at][0]))
            begin = removed[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return left
