"""What is said of how long ranks took."""

from __future__ import annotations

import pytest

from cellmesh.magics.render.timings import describe_timings, find_straggler
from cellmesh.wire.messages import Timing
from cellmesh.workers.trace.timing import add_up


def test_equal_times_are_one_line() -> None:
    assert describe_timings(dict.fromkeys(range(4), Timing(1.234, 0.0))) == "[0-3] took 1.23 s"


def test_the_straggler_is_the_one_that_waits_least() -> None:
    timings = {0: Timing(0.5, 0.4), 1: Timing(0.5, 0.4), 2: Timing(0.5, 0.001)}
    assert describe_timings(timings).splitlines() == [
        "[0-1] took 500 ms, 400 ms of it in collectives",
        "[2] took 500 ms, 1.0 ms of it in collectives",
        "rank 2 was the straggler: 499 ms outside collectives, the others 100 ms",
    ]


@pytest.mark.parametrize(
    "own",
    [[1.0], [1.0, 1.05], [0.001, 0.004], [0.5, 0.5, 0.5]],
    ids=["alone", "a little", "too short to tell", "equal"],
)
def test_there_may_be_no_straggler(own: list[float]) -> None:
    assert find_straggler({rank: Timing(seconds, 0.0) for rank, seconds in enumerate(own)}) is None


@pytest.mark.parametrize(
    ("spans", "total"),
    [
        ([], 0.0),
        ([(1.0, 2.0), (3.0, 4.0)], 2.0),
        ([(1.0, 3.0), (2.0, 4.0)], 3.0),
        ([(1.0, 4.0), (2.0, 3.0)], 3.0),
        ([(9.0, None)], 1.0),
        ([(9.0, 12.0)], 1.0),
    ],
    ids=["none", "apart", "overlapping", "one in another", "under way", "ended later"],
)
def test_times_in_collectives_count_once(
    spans: list[tuple[float, float | None]], total: float
) -> None:
    assert add_up(spans, now=10.0) == total
