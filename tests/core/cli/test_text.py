"""Numbers as people read them."""

from __future__ import annotations

import pytest

from cellmesh.cli.rendering import format_bytes, format_seconds, plural


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (64e6, "64 MB"), (1.5e9, "1.5 GB"), (2e12, "2.0 TB")],
)
def test_format_of_bytes(number: float, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0125, "12.5 ms"),
        (1.25, "1.2 s"),
        (40, "40 s"),
        (119, "119 s"),
        (300, "5 min"),
        (7200, "2 h"),
        (2e5, "2 days"),
    ],
)
def test_format_of_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plurals() -> None:
    assert [plural(1, "rank"), plural(2, "rank"), plural(0, "process")] == [
        "1 rank",
        "2 ranks",
        "0 processes",
    ]
