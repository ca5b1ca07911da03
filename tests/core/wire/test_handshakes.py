"""How many peers were refused, as far as ZeroMQ's events say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.curve import Handshakes


def test_handshakes_of_strangers_are_refused() -> None:
    seen = Handshakes()
    for _ in range(3):
        seen.accepted(15)
        seen.ended(15)
    assert seen.num_refused == 3


def test_handshakes_of_controllers_are_not_refused() -> None:
    seen = Handshakes()
    seen.accepted(15)
    seen.passed()
    seen.accepted(16)
    seen.ended(16)
    seen.ended(15)
    assert seen.num_refused == 1


@pytest.mark.parametrize("order", [(15, 16), (16, 15)])
def test_handshakes_that_overlap_are_told_apart_once_one_has_ended(order: tuple[int, int]) -> None:
    """A stranger holds a connection while a controller passes: ZeroMQ does not say which passed."""
    seen = Handshakes()
    seen.accepted(15)
    seen.accepted(16)
    seen.passed()
    for descriptor in order:
        seen.ended(descriptor)
    assert seen.num_refused == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_handshakes_are_counted_right_once_all_connections_have_ended(
    peers: list[tuple[bool, int, int]],
) -> None:
    """In any order of events: each peer is accepted, passes if it may, and ends."""
    events: list[tuple[int, int, str, int]] = []
    for index, (may_pass, begins, lasts) in enumerate(peers):
        events.append((begins, index, "accepted", index))
        if may_pass:
            events.append((begins + lasts, index, "passed", index))
        events.append((begins + lasts, index + 1000, "ended", index))
    seen = Handshakes()
    for _, _, event, descriptor in sorted(events, key=lambda event: event[:2]):
        if event == "passed":
            seen.passed()
        else:
            getattr(seen, event)(descriptor)
    assert seen.num_refused == sum(not may_pass for may_pass, *_ in peers)
