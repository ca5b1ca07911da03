"""Widgets on a rank: how values are packed, and which are gathered."""

from __future__ import annotations

import datetime
import math

import numpy as np
import pytest
import torch

from cellmesh.workers.comms import _is_plain, pack


def test_values_are_packed_as_the_kernel_would() -> None:
    values = [
        np.int64(5),
        np.float32(0.5),
        np.arange(3),
        torch.ones(2, 1),
        {"a": (1, True)},
        range(2),
    ]
    assert pack(values) == '[5, 0.5, [0, 1, 2], [[1.0], [1.0]], {"a": [1, true]}, [0, 1]]'
    assert pack([datetime.date(2020, 1, 2), b"\x00"]) == '["2020-01-02", "AA=="]'
    with pytest.raises(TypeError, match="not iterable"):
        pack(object())
    with pytest.raises(ValueError, match="Out of range"):
        pack(float("nan"))


def test_only_numbers_and_text_are_gathered() -> None:
    assert all(map(_is_plain, (1, 0.5, True, "text")))
    # A list and None behind it may be an order, and NaN is refused where it is set.
    assert not any(map(_is_plain, ([1], {}, None, math.nan)))
