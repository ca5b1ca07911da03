"""Slices of tensors reduced to pixels, compared with numpy's plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.inspect import Picture, Pixels
from cellmesh.workers.inspect.downsample import picture
from cellmesh.workers.inspect.safe_read import DIRECT

from .test_chunks import quantised


def look(value: Any, **changes: Any) -> Pixels:
    shape = value.shape
    fields: dict[str, Any] = {
        "index": (0,) * (len(shape) - 2), "dims": (0, 1), "height": 512, "width": 512,
    }  # fmt: skip
    fields |= changes
    sizes = [shape[dim] if 0 <= dim < len(shape) else 1 for dim in fields["dims"]]
    fields = {"rows": (0, sizes[0]), "cols": (0, sizes[1]), **fields}
    return picture(value, Picture("x", **fields), DIRECT)


def expected(
    part: np.ndarray[Any, Any], height: int, width: int, reduction: str
) -> np.ndarray[Any, Any]:
    """Pixel by pixel."""
    rows, cols = (
        [slice(i * size // side, (i + 1) * size // side) for i in range(side)]
        for size, side in zip(part.shape, np.minimum(part.shape, (height, width)), strict=True)
    )
    join: dict[str, Any] = {"mean": np.mean, "absmax": lambda block: np.abs(block).max()}
    return np.array([[join[reduction](part[i, j]) for j in cols] for i in rows], np.float32)


@given(st.data())
def test_pixels_are_those_of_plain_loops(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    value = torch.randn(shape, generator=generator)
    value = value.permute(data.draw(st.permutations(range(len(shape)))))
    dims = tuple(data.draw(st.permutations(range(len(shape))))[:2])
    others = [dim for dim in range(len(shape)) if dim not in dims]
    index = tuple(data.draw(st.integers(0, value.shape[dim] - 1)) for dim in others)
    ends = [st.integers(0, value.shape[dim]) for dim in dims]
    rows, cols = (
        tuple(sorted(data.draw(st.lists(each, min_size=2, max_size=2, unique=True))))
        for each in ends
    )
    reduction = data.draw(st.sampled_from(["mean", "absmax"]))
    wanted: dict[str, Any] = {
        "height": data.draw(st.integers(1, 20)), "width": data.draw(st.integers(1, 20)),
        "reduction": reduction,
    }  # fmt: skip
    found = look(value, dims=dims, index=index, rows=rows, cols=cols, **wanted)
    at: list[Any] = [slice(None)] * len(shape)
    for dim, position in zip(others, index, strict=True):
        at[dim] = position
    part = value.numpy()[tuple(at)]
    part = (part if dims[0] < dims[1] else part.T)[slice(*rows), slice(*cols)]
    assert found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, expected(part, **wanted), rtol=1e-4, atol=1e-6)
    assert found.is_exact == (found.values.shape == part.shape)
    assert (found.low, found.high) == (found.values.min(), found.values.max())
    assert not found.is_sampled


@pytest.mark.parametrize("reduction", ["mean", "absmax"])
def test_picture_shows_non_finite_elements(reduction: str) -> None:
    size = 41
    value = torch.ones(size, size)
    value[0, 0], value[size - 1, 0], value[0, size - 1] = math.nan, math.inf, -math.inf
    found = look(value, height=10, width=10, reduction=reduction)
    assert math.isnan(found.values[0, 0])
    assert found.values[-1, 0] == math.inf
    assert found.values[0, -1] == (math.inf if reduction == "absmax" else -math.inf)
    assert np.isfinite(found.values).sum() == 97
    assert (found.low, found.high) == (1.0, 1.0)


def test_a_huge_tensor_is_sampled_over_each_pixel() -> None:
    rows = torch.arange(100_000.0)[:, None].expand(100_000, 100_000)
    for value in (rows, rows.t()):
        found = look(value, height=50, width=40, max_elements=1 << 20)
        assert found.is_sampled
        lines = found.values if value is rows else found.values.T
        centres = (np.arange(len(lines)) + 0.5) * 100_000 / len(lines)
        centres = centres[:, None].repeat(lines.shape[1], 1)
        np.testing.assert_allclose(lines, centres, atol=100_000 / 200)


def test_vectors_and_numbers_are_slices_too() -> None:
    value = torch.arange(5.0)
    assert look(value, dims=(-1, 0), index=()).values.tolist() == [[0, 1, 2, 3, 4]]
    assert look(value, dims=(0, -1), index=()).values.tolist() == [[0], [1], [2], [3], [4]]
    assert look(value, dims=(-1, 0), index=(), cols=(1, 5), width=2).values.tolist() == [[1.5, 3.5]]
    assert look(torch.tensor(3.0), dims=(-1, -1), index=()).values.tolist() == [[3.0]]


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4, dtype=torch.bool), torch.eye(4, dtype=torch.int64),
        torch.eye(4).to(torch.float8_e4m3fn), (torch.eye(4) * 1j).conj(), quantised(torch.eye(4)),
        torch.eye(4, dtype=torch.float64).requires_grad_(), np.eye(4),
    ],
    ids=lambda value: f"{value.dtype}",
)  # fmt: skip
@pytest.mark.parametrize(("reduction", "half"), [("mean", 0.5), ("absmax", 1.0)])
def test_elements_of_all_types_are_drawn(value: Any, reduction: str, half: float) -> None:
    assert look(value, reduction=reduction).values.tolist() == torch.eye(4).tolist()
    halves = look(value, reduction=reduction, height=2, width=2).values.tolist()
    assert halves == [[half, 0.0], [0.0, half]]


@pytest.mark.parametrize(
    ("value", "changes", "words"),
    [
        (torch.ones(4), {"index": ()}, "no such slice: refresh"),
        (torch.ones(4, 4), {"dims": (0, 0)}, "no such slice"),
        (torch.eye(4).to_sparse(), {}, r"inspect its `.to_dense\(\)`"),
        (torch.ones(4, 4, 4), {"index": (4,)}, "no such slice"),
        (torch.ones(4, 4), {"rows": (0, 5)}, "no such slice"),
        (torch.ones(4, 4, device="meta"), {}, "meta"),
    ],
)
def test_undrawable_value_says_why(
    value: torch.Tensor, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        look(value, **changes)
