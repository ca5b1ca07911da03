"""Differences of two ranks: what differs is never told as equal, and by how much is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.magics.widgets.inspector.slices import ask_element, ask_picture, subtract
from cellmesh.wire.inspect import Pixels

from .....support.inspected_ranks import LocalAnswers

STEP = 2.0**-23  # from 1 to the next float32
CONTENT: dict[str, Any] = {
    "path": "", "rank": 1, "minus": 0, "dims": [0, 1], "index": [0, 0], "rows": [0, 2],
    "cols": [0, 2],
    "height": 9, "width": 9, "reduction": "mean"
}  # fmt: skip
PAIRS = {
    "float32": (torch.float32, 1.0, 1.0 + STEP, STEP),
    "float64": (torch.float64, 1.0, 1.0 + 1e-9, 1e-9),
    "int64": (torch.int64, 100_000_001, 100_000_002, 1.0),
    "large int64": (torch.int64, 2**62, 2**62 + 1, 1.0),
    "large uint64": (torch.uint64, 2**63 + 5, 2**63 + 2, -3.0),
    "bool": (torch.bool, False, True, 1.0),
    "bfloat16": (torch.bfloat16, 1.0, 1.0078125, 0.0078125),
    "beyond float32": (torch.float64, -1e300, 1e300, float(np.finfo(np.float32).max)),
}


def answers_of(name: str) -> LocalAnswers:
    dtype, one, other, _ = PAIRS[name]
    values = [torch.tensor([[value, one], [one, one]], dtype=dtype) for value in (one, other)]
    return LocalAnswers("w", {rank: {"w": value} for rank, value in enumerate(values)})


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("reduction", ["mean", "stride"])
def test_pictures_of_two_ranks_are_subtracted(name: str, reduction: str) -> None:
    found = ask_picture(answers_of(name), {**CONTENT, "reduction": reduction})
    assert isinstance(found, Pixels)
    assert found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, [[PAIRS[name][3], 0], [0, 0]], rtol=1e-6)
    assert found.low == min(0.0, found.values[0, 0])


def test_a_mean_shows_one_element_that_differs_a_little() -> None:
    values = [torch.ones(64, 64), torch.ones(64, 64)]
    values[1][3, 40] += STEP
    answers = LocalAnswers("w", {rank: {"w": value} for rank, value in enumerate(values)})
    content = {**CONTENT, "rows": [0, 64], "cols": [0, 64], "height": 2, "width": 2}
    for changes in ({}, {"height": 3, "width": 5}):
        found = ask_picture(answers, {**content, **changes})
        assert isinstance(found, Pixels)
        assert np.count_nonzero(found.values) == 1
    alone = ask_picture(answers, {**content, "minus": None})
    assert isinstance(alone, Pixels)
    assert alone.values.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("float32", "1.1920929e-07 (1.0000001192092896 − 1.0)"),
        ("large int64", f"1 ({2**62 + 1} − {2**62})"),
        ("large uint64", f"-3 ({2**63 + 2} − {2**63 + 5})"),
        ("bool", "not equal (True − False)"),
    ],
)
def test_elements_of_two_ranks_are_subtracted(name: str, difference: str) -> None:
    assert ask_element(answers_of(name), CONTENT) == {"text": difference}
    assert "−" not in ask_element(answers_of(name), {**CONTENT, "minus": None})["text"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor([[1.0 + STEP]]), "1.0000001"),
        (torch.tensor([[1 / 3]], dtype=torch.float64), repr(1 / 3)),
        (torch.tensor([[2**53 + 1]]), str(2**53 + 1)),
    ],
)
def test_elements_are_exact(value: torch.Tensor, text: str) -> None:
    answers, alone = LocalAnswers("w", {1: {"w": value}}), {**CONTENT, "minus": None}
    assert ask_element(answers, alone) == {"text": text}
    assert "error" in ask_element(answers, {**alone, "index": [5, 5]})


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["3", "1.5"], "1.5 (3 − 1.5)"),
        (["inf", "inf"], "nan (inf − inf)"),
        (["(1+2j)", "1.0"], "2j ((1+2j) − 1.0)"),
        (["True", "True"], "equal (True − True)"),
    ],
)
def test_numbers_of_two_kinds_are_subtracted(texts: list[str], said: str) -> None:
    assert subtract(texts) == said
