"""What is said of how long ranks took."""

from __future__ import annotations

import pytest

from cellmesh.magics.render.profiles import describe_timings, find_straggler
from cellmesh.wire.user_code import Timing


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
