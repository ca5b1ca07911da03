"""Tensors read piece by piece: statistics, histograms and digests of any of them."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parameter import UninitializedParameter

from cellmesh.magics.views.inspector.view_model import is_drawable
from cellmesh.wire.inspect import Overview, Picture, Refusal
from cellmesh.workers.inspect.chunks import (
    digest_of,
    histogram_of,
    pieces,
    statistics,
)
from cellmesh.workers.inspect.summary import describe
from tests.support.inspected_ranks import ask


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Tensors of any strides: sliced, transposed, expanded."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    value = noise(*shape, seed=draw(st.integers(0, 99)))
    value = value.permute(draw(st.permutations(range(len(shape)))))
    value = value[tuple(slice(None, None, draw(st.integers(1, 2))) for _ in shape)]
    return value.expand(3, *value.shape) if draw(st.booleans()) else value


@given(tensors(), st.integers(1, 50))
def test_pieces_make_up_the_tensor_in_row_major_order(value: torch.Tensor, size: int) -> None:
    found = list(pieces(value, size))
    assert all(0 < piece.numel() <= size for piece in found)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in found]), value.reshape(-1))


def check_statistics(value: torch.Tensor, **counts: int) -> None:
    found, plain = statistics(value), value[value.isfinite()].double().numpy()
    assert found == {
        "min": plain.min(),
        "max": plain.max(),
        "mean": pytest.approx(plain.mean(), abs=1e-12),
        "std": pytest.approx(plain.std(), rel=1e-9, abs=1e-12),
        "norm": pytest.approx(np.linalg.norm(plain), rel=1e-12),
        "num_nan": 0, "num_inf": 0, "num_zeros": 0, **counts,
    }  # fmt: skip


@given(tensors())
def test_statistics_and_digests_do_not_depend_on_strides(value: torch.Tensor) -> None:
    check_statistics(value)
    assert digest_of(value) == digest_of(value.contiguous())


def test_statistics_over_many_pieces() -> None:
    value = noise(300, 1001)
    value[5, 7], value[200, 3], value[299, 1000] = math.nan, math.inf, -math.inf
    value[:, 13] = 0
    check_statistics(value, num_nan=1, num_inf=2, num_zeros=300)
    # A large mean does not spoil the deviation.
    check_statistics(torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64).repeat(200_000))
    assert statistics(torch.full((3,), 0.1))["std"] == 0.0
    # The squares of such numbers overflow.
    far = torch.tensor([1e200, 3e200], dtype=torch.float64).repeat_interleave(200_000)
    found = statistics(far)
    assert (found["min"], found["max"], found["std"]) == (1e200, 3e200, math.inf)


def test_an_expanded_tensor_is_read_once() -> None:
    value, other = (
        torch.tensor([0.0, most, math.nan])[:, None].expand(3, 10**12) for most in (1.0, 2.0)
    )
    found = statistics(value)
    assert (found["num_nan"], found["num_zeros"]) == (10**12, 10**12)
    assert (found["mean"], found["norm"]) == (0.5, 10**6)
    assert histogram_of(value, 0.0, 1.0, 4) == (10**12, 0, 0, 10**12)
    assert digest_of(value) != digest_of(other)


@given(tensors(), st.integers(1, 9))
def test_histograms_are_those_of_numpy(value: torch.Tensor, num_bins: int) -> None:
    plain = value.double().numpy()
    low, high = float(plain.min()), float(plain.max())
    counts = histogram_of(value, low - 1, high + 1, num_bins)
    assert counts == tuple(np.histogram(plain, num_bins, (low - 1, high + 1))[0])
    assert sum(histogram_of(value, low, high, num_bins)) == value.numel()


def test_histogram_leaves_out_values_beyond_its_scale_and_nan() -> None:
    value = torch.tensor([-1.0, 0.0, 0.4, 1.0, 2.0, math.nan, math.inf])
    assert histogram_of(value, 0.0, 1.0, 2) == (2, 1)
    assert histogram_of(value, 1.0, 1.0, 3) == (0, 1, 0)
    assert histogram_of(torch.tensor([True, False, True]), 0.0, 1.0, 2) == (1, 2)


# ---- digests


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_digest_of_a_large_tensor_does_not_depend_on_strides(dtype: str) -> None:
    value = (noise(613, 701) * 50).to(getattr(torch, dtype))
    wide = torch.zeros(613, 1402, dtype=value.dtype)
    wide[:, ::2] = value
    assert {digest_of(each) for each in (value, value.t().contiguous().t(), wide[:, ::2])} == {
        digest_of(value.clone())
    }


def test_digest_of_a_large_tensor_changes_with_every_change() -> None:
    value = noise(400_000)
    last, signs, swapped = value.clone(), value.clone(), value.clone()
    last[-1] = torch.nextafter(last[-1], torch.tensor(9.0))
    signs[[5, 70_000]] *= -1  # signs are the highest bits, which products keep to themselves
    swapped[[7, 8]] = swapped[[8, 7]]
    inverted = value.view(torch.int32).bitwise_not().view(torch.float32)
    changed = [value, last, signs, -value, swapped, value.roll(1), value.roll(65_536), inverted]
    assert len({digest_of(each) for each in changed}) == 8


# ---- odd tensors


def quiet(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Ignore warnings that what is made is a prototype."""

    def make_quietly(*args: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(*args)

    return make_quietly


PLAIN = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
BYTES = torch.zeros(4, dtype=torch.uint8)


@quiet
def quantised(value: torch.Tensor = PLAIN) -> torch.Tensor:
    return torch.quantize_per_tensor(value, 0.5, 0, torch.qint8)


@quiet
def per_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.5, 1.0]), torch.tensor([0, 0])
    return torch.quantize_per_channel(PLAIN, scales, zeros, 0, torch.qint8)


@quiet
def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3, 2)


def freed() -> torch.Tensor:
    value = torch.ones(3, 2)
    value.untyped_storage().resize_(0)
    return value


class Refusing(torch.Tensor):
    """A subclass that computes nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "numel" in str(func) or "reshape" in str(func) or "to" in getattr(func, "__name__", ""):
            raise RuntimeError("this tensor\nrefuses")
        return super().__torch_function__(func, types, args, kwargs)


# Name -> how it is made, its shape, its maximum, a part of the note.
ODD: dict[str, tuple[Any, tuple[int, ...] | None, float | None, str]] = {
    "meta": (lambda: torch.empty(3, 2, device="meta"), (3, 2), None, "meta"),
    "quantised": (quantised, (2, 2), 3.0, "stands for"),
    "per channel": (per_channel, (2, 2), 3.0, "stands for"),
    "sparse": (lambda: torch.eye(3).to_sparse(), (3, 3), 1.0, "3 elements that it stores"),
    "complex": (lambda: torch.tensor([1 + 2j, 3 - 4j]), (2,), 3.0, "real and imaginary"),
    "0-d": (lambda: torch.tensor(7, dtype=torch.uint64), (), 7.0, ""),
    "empty": (lambda: torch.empty(0, 3), (0, 3), None, ""),
    "float8": (lambda: torch.ones(4).to(torch.float8_e5m2), (4,), 1.0, ""),
    "float4": (lambda: BYTES.view(torch.float4_e2m1fn_x2), (4,), None, "no statistics"),
    "negated": (lambda: torch.view_as_complex(torch.ones(3, 2)).conj().imag, (3,), -1.0, ""),
    "jagged": (lambda: nested(torch.jagged), (2, -1, 3), 1.0, "stores"),
    "fake": (fake, (3, 2), None, "fake"),
    "freed": (freed, (3, 2), None, "freed"),
    "unfinished": (lambda: AsyncCollectiveTensor(torch.ones(3)), (3,), None, "waited for"),
    "uninitialised": (UninitializedParameter, None, None, "not initialised"),
    "refusing": (lambda: torch.ones(3).as_subclass(Refusing), (3,), None, "no statistics"),
}


@pytest.mark.parametrize(("make", "shape", "most", "note"), ODD.values(), ids=ODD)
def test_odd_tensors_are_described_with_their_missing_parts(
    make: Any, shape: tuple[int, ...] | None, most: float | None, note: str
) -> None:
    facts = describe(make())
    assert (facts.shape, facts.max) == (shape, most)
    assert note in facts.note
    assert facts.dtype
    assert bool(facts.note) == bool(note)


def test_tensor_inside_a_function_transform_is_not_read() -> None:
    seen = []
    torch.vmap(lambda value: seen.append(describe(value)) or value)(torch.ones(3, 2))
    assert seen[0].max is None
    assert "transform" in seen[0].note


def facts_of(value: Any) -> Any:
    return ask(value, Overview("x")).items[0]


@pytest.mark.parametrize("make", [odd[0] for odd in ODD.values()], ids=ODD)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_values_marked_drawable_can_be_drawn(make: Callable[[], Any]) -> None:
    value = make()
    facts = facts_of(value)
    assert is_drawable(facts) == (
        facts.max is not None and facts.shape != () and "stores" not in facts.note
    )
    if not is_drawable(facts):
        return
    num_dims, shape = len(facts.local_shape), (1, *facts.local_shape)[-2:]
    place: dict[str, Any] = {
        "index": (0,) * (num_dims - 2), "dims": (max(num_dims - 2, -1), num_dims - 1),
        "rows": (0, shape[0]), "cols": (0, shape[1]),
    }  # fmt: skip
    for side, reduction in itertools.product((1, 9), ("mean", "absmax")):
        subject = Picture("x", **place, height=side, width=side, reduction=reduction)
        drawn = ask(value, subject)
        assert not isinstance(drawn, Refusal), (subject, drawn)


# ---- summaries


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
    assert (facts.text, facts.is_scalar) == ("", False)
    unread = describe(value, is_read=False)
    assert (unread.max, unread.digest, unread.num_bytes) == (None, "", 16)
    assert describe(torch.eye(3).to_sparse()).num_bytes == 3 * 4 + 2 * 3 * 8
    number = describe(torch.tensor(0.25))
    assert (number.text, number.is_scalar) == ("0.25", True)


def test_values_without_a_finite_element_have_no_statistics() -> None:
    facts = describe(torch.tensor([math.nan, math.inf]))
    assert (facts.num_nan, facts.num_inf) == (1, 1)
    assert (facts.min, facts.max, facts.mean, facts.std, facts.norm) == (None,) * 5


READ_ONLY = np.arange(4.0)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4.0)[::-1], np.arange(4, dtype=">f8"), np.arange(4, dtype=np.uint16),
        np.float64(3.0), READ_ONLY,
    ],
    ids=["reversed", "big-endian", "uint16", "scalar", "read-only"],
)  # fmt: skip
def test_arrays_are_described_by_their_numbers(array: Any) -> None:
    facts = describe(array)
    assert (facts.shape, facts.max) == (array.shape, float(array.max()))


@pytest.mark.parametrize("dtype", ["U1", object, "M8[D]", [("a", "f4"), ("b", "i4")]])
def test_arrays_without_numbers_are_described_by_their_text(dtype: Any) -> None:
    facts = describe(np.zeros(2, dtype))
    assert facts.kind == "numpy.ndarray"
    assert "array" in facts.text


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000))])
def test_long_values_have_a_short_text(value: Any) -> None:
    facts = describe(value)
    assert 0 < len(facts.text) <= 200
    assert facts.digest != describe(value[:-1]).digest
