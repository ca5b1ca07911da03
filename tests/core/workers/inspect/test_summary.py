"""Describing values: numbers of tensors, a short text of others, never a failure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.inspect import TensorSummary
from cellmesh.workers.inspect.summary import describe, is_dtensor

from ....support.examples import examples

# ---- tensors


def test_a_tensor_is_described_by_its_numbers() -> None:
    facts = describe(torch.tensor([[1.0, 2.0], [3.0, 6.0]], requires_grad=True))
    assert facts.kind == "torch.Tensor"
    assert facts.shape == facts.local_shape == (2, 2)
    assert (facts.dtype, facts.device, facts.placements) == ("float32", "cpu", "")
    assert facts.requires_grad
    assert facts.num_bytes == 16
    assert (facts.min, facts.max, facts.mean) == (1.0, 6.0, 3.0)
    assert facts.std == pytest.approx(math.sqrt(3.5))
    assert facts.norm == pytest.approx(math.sqrt(50))
    assert (facts.num_nan, facts.num_inf) == (0, 0)
    assert facts.shard == ()
    assert facts.text == ""


def test_a_tensor_without_dims_is_its_number() -> None:
    facts = describe(torch.tensor(0.25, requires_grad=True))
    assert (facts.shape, facts.text, facts.is_scalar) == ((), "0.25", True)
    assert describe(torch.tensor(math.nan)).text == "nan"
    assert describe(torch.tensor(7)).text == "7"
    assert not describe(torch.ones(1)).is_scalar
    assert not describe(torch.empty((), device="meta")).is_scalar


def test_non_finite_elements_are_counted_and_left_out() -> None:
    facts = describe(torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0]))
    assert (facts.num_nan, facts.num_inf) == (1, 2)
    assert (facts.min, facts.max, facts.mean) == (1.0, 3.0, 2.0)


def test_without_finite_elements_there_are_only_counts() -> None:
    facts = describe(torch.full((4,), math.nan))
    assert facts.num_nan == 4
    assert (facts.min, facts.max, facts.mean, facts.std, facts.norm) == (None,) * 5


def test_a_parameter_is_described_as_one() -> None:
    facts = describe(torch.nn.Parameter(torch.zeros(2)))
    assert facts.kind == "torch.nn.parameter.Parameter"
    assert facts.requires_grad


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_tensors_of_every_type_have_numbers_and_a_digest(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    facts = describe(torch.ones(shape).to(dtype))
    assert facts.dtype == str(dtype).removeprefix("torch.")
    assert facts.max == 1.0
    assert facts.digest


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int64),
        torch.empty(3, device="meta"),
        torch.empty((), device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(3, 3)[:, ::2],
        torch.ones(1).expand(5),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.view_as_complex(torch.ones(3, 2)).conj().imag,
    ],
    ids=[
        "empty",
        "empty int",
        "meta",
        "meta scalar",
        "sparse",
        "strided",
        "expanded",
        "conjugate",
        "negated",
    ],
)
def test_unusual_tensors_are_described(tensor: torch.Tensor) -> None:
    facts = describe(tensor)
    assert facts.shape == tuple(tensor.shape)
    assert facts.device == str(tensor.device)


def test_digest_differs_for_every_bit() -> None:
    value = torch.randn(100, generator=torch.Generator().manual_seed(1))
    other = value.clone()
    assert describe(value).digest == describe(other).digest
    other[50] = torch.nextafter(other[50], torch.tensor(9.0))
    assert describe(value).digest != describe(other).digest


def test_the_digest_does_not_depend_on_the_layout() -> None:
    value = torch.arange(12.0).reshape(3, 4)
    assert describe(value).digest == describe(value.t().contiguous().t()).digest


def test_large_tensors_are_described_too() -> None:
    facts = describe(torch.ones(1 << 20))
    assert (facts.min, facts.max, facts.mean, facts.std) == (1.0, 1.0, 1.0, 0.0)


@examples(50)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_statistics_are_those_of_the_finite_elements(values: list[float]) -> None:
    facts = describe(torch.tensor(values))
    finite = [value for value in values if math.isfinite(value)]
    assert facts.num_nan == sum(map(math.isnan, values))
    assert facts.num_inf == sum(map(math.isinf, values))
    if finite:
        assert facts.min == min(finite)
        assert facts.max == max(finite)
        assert facts.mean == pytest.approx(math.fsum(finite) / len(finite), rel=1e-6, abs=1e-30)


# ---- arrays


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4.0),
        np.arange(4.0)[::-1],
        np.arange(4, dtype=">f8"),
        np.arange(4, dtype=np.uint16),
        np.array([True, False]),
        np.float64(3.0),
        np.ones((2, 3), order="F"),
    ],
    ids=["plain", "reversed", "big-endian", "uint16", "bool", "scalar", "fortran"],
)
def test_arrays_are_described_by_their_numbers(array: Any) -> None:
    facts = describe(array)
    assert facts.kind.startswith("numpy.")
    assert facts.shape == array.shape
    assert facts.max == float(array.max())


def test_an_array_that_may_not_be_written_to_is_described_without_a_warning() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    assert describe(array).max == 3.0


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([None, {}], dtype=object),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
    ],
    ids=["text", "objects", "dates", "records"],
)
def test_arrays_without_numbers_are_described_by_their_text(array: Any) -> None:
    facts = describe(array)
    assert facts.kind == "numpy.ndarray"
    assert "array" in facts.text


# ---- anything else


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (3, "int", "3"),
        ("text", "str", "'text'"),
        (None, "NoneType", "None"),
        ([1, 2], "list", "[1, 2]"),
        ({"a": 1}, "dict", "{'a': 1}"),
    ],
)
def test_other_values_are_described_by_type_and_text(value: Any, kind: str, text: str) -> None:
    facts = describe(value)
    assert (facts.kind, facts.text) == (kind, text)
    assert facts.shape is None
    assert facts.digest


@pytest.mark.parametrize(
    "value", ["x" * 10_000, list(range(10_000)), dict.fromkeys(range(1000), "y" * 100)]
)
def test_long_values_have_a_short_text(value: Any) -> None:
    facts = describe(value)
    assert 0 < len(facts.text) <= 200
    assert facts.digest != describe(value[:-1] if not isinstance(value, dict) else {}).digest


def test_a_value_without_a_repr_is_described_all_the_same() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("not telling")

    facts = describe(Shy())
    assert facts.kind.endswith("Shy")


def test_facts_survive_the_wire() -> None:
    facts = describe(torch.ones(2, 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=TensorSummary) == facts


# ---- DTensors


@pytest.fixture
def world() -> Iterator[None]:
    """A process group that pretends to be rank 1 of 4."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_dtensor_is_described_by_this_ranks_part(world: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = DTensor.from_local(torch.ones(4, 3), mesh, [Replicate(), Shard(0)], run_check=False)
    assert is_dtensor(value)
    facts = describe(value)
    assert facts.shape == (8, 3)
    assert facts.local_shape == (4, 3)
    assert facts.num_bytes == 48
    # Rank 1 is at dp=0, tp=1: what it holds is replicated over dp, and the second part over tp.
    assert facts.shard == (-1, 1)
    assert "R" in facts.placements
    assert "S(0)" in facts.placements or "Shard(dim=0)" in facts.placements


def test_only_dtensors_are_dtensors() -> None:
    assert not is_dtensor(torch.ones(1))
    assert not is_dtensor(3)
