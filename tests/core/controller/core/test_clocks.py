"""Offsets of clocks from exchanges with any delays: the true offset is within the error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.core.clocks import (
    ClockComparison,
    ClockOffset,
    describe_clocks,
)

delays = st.floats(0, 2)
# What the exchanges themselves cost of a double's precision, in days of uptime.
_ROUNDING_S = 1e-7


def exchange(
    clock: ClockComparison, at_s: float, offset_s: float, there_s: float, back_s: float
) -> None:
    clock.add(at_s, at_s + there_s + offset_s, at_s + there_s + back_s)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 1000), delays, delays), min_size=1, max_size=20),
)
def test_true_offset_is_within_the_error(
    offset_s: float, exchanges: list[tuple[float, float, float]]
) -> None:
    """Whatever the delays are, and if one way takes all of the time."""
    clock = ClockComparison()
    for at_s, there_s, back_s in exchanges:
        exchange(clock, at_s, offset_s, there_s, back_s)
    found = offset_of(clock)
    assert abs(offset_s - found.offset_s) <= found.error_s + _ROUNDING_S


def offset_of(clock: ClockComparison) -> ClockOffset:
    found = clock.offset("b")
    assert found is not None
    return found


def test_old_exchange_counts_no_more_where_clocks_drift() -> None:
    clock = ClockComparison()
    exchange(clock, 0, 5, 0.001, 0.001)
    for at_s in range(1, 9):
        exchange(clock, 1000 + at_s, 6, 0.002, 0.002)
    assert offset_of(clock).offset_s == pytest.approx(6, abs=1e-9)


def test_offsets_are_described_with_their_errors() -> None:
    near, far = ClockOffset("a", -0.00004, 0.00011), ClockOffset("b", 1203.5, 0.0002)
    assert describe_clocks([near, near, far]) == (
        "clocks of hosts, against the notebook's: a: +0.0000 s ± 0.11 ms, b: +1,203.5000 s ± 0.2 ms"
    )
    assert describe_clocks([]) == ""
