"""Numbers as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.cli.rendering import format_bytes, format_seconds, plural


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(64e6), "64 MB"),
        (format_bytes(1.5e9), "1.5 GB"),
        (format_bytes(2e12), "2.0 TB"),
        (format_seconds(0.0125), "12.5 ms"),
        (format_seconds(1.25), "1.2 s"),
        (format_seconds(40), "40 s"),
        (format_seconds(119), "119 s"),
        (format_seconds(300), "5 min"),
        (format_seconds(7200), "2 h"),
        (format_seconds(2e5), "2 days"),
        (plural(1, "rank"), "1 rank"),
        (plural(2, "rank"), "2 ranks"),
        (plural(0, "process"), "0 processes"),
    ],
)
def test_numbers_as_text(text: Any, expected: str) -> None:
    assert text == expected
