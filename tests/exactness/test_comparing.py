"""What is said of losses that differ."""

from __future__ import annotations

import math

from tests.exactness.comparing import difference


def test_equal_losses_have_no_difference() -> None:
    assert (
        difference("a", {0: [1.0, math.nan], 1: [2.0]}, "b", {0: [1.0, math.nan], 1: [2.0]}) == ""
    )


def test_the_first_step_that_differs_is_named() -> None:
    near = math.nextafter(0.5, 1.0)
    said = difference(
        "by cell", {0: [1.0, 0.5], 1: [1.0, 0.5]}, "by hand", {0: [1.0, 0.5], 1: [1.0, near]}
    )
    assert said.startswith(
        "step 1 on rank 1: 0.5 (0x1.0000000000000p-1) by cell, 0.5000000000000001 "
    )
    assert "a difference of 1.11e-16; on 1 of 2 ranks" in said


def test_different_number_of_steps_is_reported() -> None:
    assert (
        difference("by cell", {0: [1.0]}, "by hand", {0: [1.0, 0.5]})
        == "rank 0 took 1 steps by cell and 2 by hand"
    )


def test_zeros_of_different_signs_differ() -> None:
    assert difference("a", {0: [0.0]}, "b", {0: [-0.0]}) != ""
