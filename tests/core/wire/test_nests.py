"""Rows of tensors and arrays in nests: split for ranks, and joined."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import MeshUsageError
from cellmesh.wire.nests import check_rows, join_rows, split_rows


class Batch(NamedTuple):
    tokens: Any
    scale: float


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: Any
    scale: float


LEAVES = st.one_of(
    st.integers(1, 3).map(lambda n: torch.arange(12.0 * n).reshape(12, n)),
    st.just(np.arange(12)),
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        inner.map(lambda each: Batch(each, 0.5)),
        inner.map(lambda each: Sample(each, 0.5)),
        inner.map(lambda each: collections.OrderedDict(each=each)),
    ),
    max_leaves=6,
)


@given(NESTS, st.integers(1, 12))
def test_joined_parts_are_the_whole(nest: Any, num_parts: int) -> None:
    joined = join_rows([split_rows(nest, index, num_parts) for index in range(num_parts)])

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, (torch.Tensor, np.ndarray)):
            return type(one) is type(other) and bool((one == other).all())
        if isinstance(one, Sample):
            return same(one.tokens, other.tokens) and same(one.scale, other.scale)
        if isinstance(one, dict):
            return (
                type(one) is type(other)
                and one.keys() == other.keys()
                and all(same(one[key], other[key]) for key in one)
            )
        if isinstance(one, (list, tuple)):
            return type(one) is type(other) and all(map(same, one, other))
        return bool(other == [one] * num_parts)

    assert same(nest, joined)


def test_results_without_tensors_are_listed_and_numbers_stacked() -> None:
    parts = [{"loss": torch.tensor(float(n)), "text": ["a"] * n} for n in (1, 2)]
    joined = join_rows(parts)
    assert joined["loss"].tolist() == [1.0, 2.0]
    assert joined["text"] == [["a"], ["a", "a"]]
    assert join_rows([1, None]) == [1, None]
    assert join_rows([[torch.ones(1)], [torch.ones(1)] * 2])[1] == [torch.ones(1)] * 2
    assert join_rows([torch.ones(1), None]) == [torch.ones(1), None]
    assert join_rows([Sample(1, 2), Sample(3, 4)]) == [Sample(1, 2), Sample(3, 4)]


def test_tensors_whose_other_sizes_differ_are_not_joined() -> None:
    with pytest.raises(MeshUsageError, match=r"shapes \(2, 3\), \(2, 4\) .*run.gather"):
        join_rows([{"tokens": torch.ones(2, 3)}, {"tokens": torch.ones(2, 4)}])
    with pytest.raises(MeshUsageError, match=r"shapes \(2,\), \(\)"):
        join_rows([torch.ones(2), torch.tensor(1.0)])


def as_dtensor(x: torch.Tensor) -> Any:
    x.device_mesh = None  # type: ignore[attr-defined]
    return x


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([as_dtensor(torch.ones(4))], r"got a DTensor: pass its `.full_tensor\(\)`"),
        (torch.ones(3, 2), "cannot split 3 rows into 4 parts"),
        (torch.tensor(1.0), "cannot split 0 rows"),
        ([torch.ones(4), np.ones(5)], r"these have the shapes \(4,\), \(5,\)"),
        (([1], {"a": "b"}), "has no tensors to split"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(value: Any, match: str) -> None:
    with pytest.raises(MeshUsageError, match=match):
        check_rows(value, 4, "trainer.step")
    check_rows(torch.ones(4), 4, "trainer.step")
