"""The address at which agents find the notebook's host."""

from __future__ import annotations

import pytest

from cellmesh.controller.session.launch.invited_hosts import choose_address as choose
from cellmesh.errors import MeshUsageError

ALL = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"], "down": []}


@pytest.mark.parametrize(
    ("wanted", "routed", "expected"),
    [
        ("eth0", "10.1.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.1.0.1", "10.0.0.1"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("", "10.1.0.1", "10.1.0.1"),
    ],
)
def test_address_is_the_wanted_one_or_that_of_the_route(
    wanted: str, routed: str, expected: str
) -> None:
    assert choose(wanted, ALL, routed) == expected


def test_only_address_needs_no_route() -> None:
    assert choose("", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}, "") == "10.0.0.1"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("", "at which address"),
        ("eth7", "no such address or interface .*eth0 10.0.0.1"),
        ("0.0.0.0", "no such address"),
        ("down", "no such address"),
    ],
)
def test_address_that_cannot_be_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        choose(wanted, ALL, "")
