"""Intervals of time, against a clock that ticks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.trace import covered, cut_out, join

_INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def ticks(intervals: list[tuple[int, int]]) -> list[int]:
    return [tick for begin, end in intervals for tick in range(begin, end)]


@given(intervals=_INTERVALS, holes=_INTERVALS)
def test_intervals_without_holes_are_what_a_clock_would_see(
    intervals: list[tuple[int, int]], holes: list[tuple[int, int]]
) -> None:
    left = ticks(cut_out(intervals, holes))
    assert left == sorted(set(ticks(intervals)) - set(ticks(holes)))
    assert covered(intervals) == len(set(ticks(intervals)))


@given(intervals=_INTERVALS, max_gap=st.integers(0, 10))
def test_joined_intervals_lie_apart_and_cover_what_they_were(
    intervals: list[tuple[int, int]], max_gap: int
) -> None:
    joined = join(intervals, max_gap)
    assert set(ticks(intervals)) <= set(ticks(joined))
    assert all(after - end > max_gap for (_, end), (after, _) in itertools.pairwise(joined))
