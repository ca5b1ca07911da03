"""Texts of losses that differ."""

from __future__ import annotations

import math

import pytest

from tests.exactness.comparing import Losses, difference

NEAR = math.nextafter(0.5, 1.0)


@pytest.mark.parametrize(
    ("by_cell", "by_hand", "text"),
    [
        ({0: [1.0, math.nan], 1: [2.0]}, {0: [1.0, math.nan], 1: [2.0]}, ""),
        (
            {0: [1.0, 0.5], 1: [1.0, 0.5]},
            {0: [1.0, 0.5], 1: [1.0, NEAR]},
            "step 1 on rank 1: 0.5 (0x1.0000000000000p-1) by cell, 0.5000000000000001 ",
        ),
        ({0: [1.0]}, {0: [1.0, 0.5]}, "rank 0 took 1 steps by cell and 2 by hand"),
        ({0: [0.0]}, {0: [-0.0]}, "step 0 on rank 0: 0.0 "),
    ],
)
def test_the_first_step_that_differs_is_named(by_cell: Losses, by_hand: Losses, text: str) -> None:
    found = difference("by cell", by_cell, "by hand", by_hand)
    assert found.startswith(text)
    assert bool(found) == bool(text)
    if "step 1" in text:
        assert "a difference of 1.11e-16; on 1 of 2 ranks" in found
