"""Describing values: numbers of tensors, a short text of others, never a failure."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from cellmesh.wire.inspect import TensorSummary
from cellmesh.workers.inspect.summary import describe

from ....support.examples import examples

# ---- tensors


def test_a_tensor_is_described_by_its_numbers() -> None:
    value = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    facts = describe(value)
    assert facts.kind == "torch.nn.parameter.Parameter"
    assert facts.shape == facts.local_shape == (2, 2)
    assert (facts.dtype, facts.device, facts.placements) == ("float32", "cpu", "")
    assert (facts.requires_grad, facts.num_bytes) == (True, 16)
    assert (facts.min, facts.max, facts.mean) == (1.0, 6.0, 3.0)
    assert (facts.std, facts.norm) == pytest.approx((math.sqrt(3.5), math.sqrt(50)))
    assert (facts.num_nan, facts.num_inf) == (0, 0)
    assert (facts.shard, facts.text) == ((), "")
    unread = describe(value, is_read=False)
    assert (unread.max, unread.digest, unread.num_bytes) == (None, "", 16)
    view = describe(torch.ones(10, 10)[:, ::2])
    assert (view.strides, view.num_bytes) == ((10, 2), 200)
    assert describe(torch.eye(3).to_sparse()).num_bytes == 3 * 4 + 2 * 3 * 8


def test_a_tensor_without_dims_is_its_number() -> None:
    facts = describe(torch.tensor(0.25, requires_grad=True))
    assert (facts.shape, facts.text, facts.is_scalar) == ((), "0.25", True)
    assert describe(torch.tensor(math.nan)).text == "nan"
    assert describe(torch.tensor(7)).text == "7"
    assert not describe(torch.ones(1)).is_scalar
    assert not describe(torch.empty((), device="meta")).is_scalar


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64,
        torch.bool, torch.complex64, torch.float8_e4m3fn,
    ],
    ids=str,
)  # fmt: skip
def test_tensors_of_every_type_have_numbers_and_a_digest(dtype: torch.dtype) -> None:
    for shape in ((), (2, 3)):
        facts = describe(torch.ones(shape).to(dtype))
        assert (facts.dtype, facts.max) == (str(dtype).removeprefix("torch."), 1.0)
        assert facts.digest


@examples(50)
@example([math.nan, math.inf, -math.inf])
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_statistics_are_those_of_the_finite_elements(values: list[float]) -> None:
    facts = describe(torch.tensor(values))
    finite = [value for value in values if math.isfinite(value)]
    assert facts.num_nan == sum(map(math.isnan, values))
    assert facts.num_inf == sum(map(math.isinf, values))
    if not finite:
        assert (facts.min, facts.max, facts.mean, facts.std, facts.norm) == (None,) * 5
        return
    assert (facts.min, facts.max) == (min(finite), max(finite))
    assert facts.mean == pytest.approx(math.fsum(finite) / len(finite), rel=1e-6, abs=1e-30)


# ---- arrays


READ_ONLY = np.arange(4.0)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4.0)[::-1], np.arange(4, dtype=">f8"), np.arange(4, dtype=np.uint16),
        np.array([True, False]), np.float64(3.0), np.ones((2, 3), order="F"), READ_ONLY,
    ],
    ids=["reversed", "big-endian", "uint16", "bool", "scalar", "fortran", "read-only"],
)  # fmt: skip
def test_arrays_are_described_by_their_numbers(array: Any) -> None:
    facts = describe(array)
    assert facts.kind.startswith("numpy.")
    assert (facts.shape, facts.max) == (array.shape, float(array.max()))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]), np.array([None, {}], dtype=object),
        np.array(["2020-01-01"], dtype="M8[D]"), np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
    ],
    ids=["text", "objects", "dates", "records"],
)  # fmt: skip
def test_arrays_without_numbers_are_described_by_their_text(array: Any) -> None:
    facts = describe(array)
    assert facts.kind == "numpy.ndarray"
    assert "array" in facts.text


# ---- anything else


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(None, "NoneType", "None"), ("text", "str", "'text'"), ({"a": 1}, "dict", "{'a': 1}")],
)
def test_other_values_are_described_by_type_and_text(value: Any, kind: str, text: str) -> None:
    facts = describe(value)
    assert (facts.kind, facts.text, facts.shape) == (kind, text, None)
    assert facts.digest


@pytest.mark.parametrize(
    "value", ["x" * 10_000, list(range(10_000)), dict.fromkeys(range(1000), "y" * 100)]
)
def test_long_values_have_a_short_text(value: Any) -> None:
    facts = describe(value)
    assert 0 < len(facts.text) <= 200
    assert facts.digest != describe(value[:-1] if not isinstance(value, dict) else {}).digest


def test_facts_survive_the_wire() -> None:
    facts = describe(torch.ones(2, 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=TensorSummary) == facts
