"""Spans of time are read as users write them."""

from __future__ import annotations

import pytest

from cellmesh.controller.duration import parse_duration
from cellmesh.errors import MeshUsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("30m", 1800),
        ("30 min", 1800),
        ("1.5h", 5400),
        (" 2d ", 172800),
        (".5s", 0.5),
    ],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "30x", "-5", "5m3s", "nan", "1e3", "30 m m"])
def test_invalid_durations_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshUsageError, match="is no span of time: write it like 30m"):
        parse_duration(text)
