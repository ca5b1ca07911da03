"""Inspecting ranks: their answers, and comparisons of replicas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.inspect import (
    Comparison,
    Inspection,
    LargestDifference,
    Replicas,
    compare,
    differing,
    largest_difference,
    size_of,
    split,
)
from cellmesh.wire.inspect import Refusal, TensorSummary, ValueSummary
from cellmesh.workers.inspect.chunks import elements_of_parts

# ---- replicas


def tensor(
    digest: str, shard: tuple[int, ...] = (), mesh: tuple[int, ...] = (), **changes: Any
) -> TensorSummary:
    facts: dict[str, Any] = {
        "kind": "torch.Tensor", "shape": (2,), "local_shape": (2,), "dtype": "float32"
    }  # fmt: skip
    return TensorSummary(**{**facts, **changes}, digest=digest, shard=shard, mesh_ranks=mesh)


def alike(*facts: TensorSummary) -> list[tuple[tuple[int, ...], ...]]:
    return [each.alike for each in compare(dict(enumerate(facts))).replicas]


def test_ranks_with_the_same_digest_shape_and_type_are_alike() -> None:
    assert alike(tensor("a"), tensor("b"), tensor("a")) == [((0, 2), (1,))]
    assert alike(tensor("a"), tensor("a", local_shape=(2, 1))) == [((0,), (1,))]
    assert alike(tensor("a"), tensor("a", kind="torch.nn.parameter.Parameter")) == [((0, 1),)]


def test_parts_of_different_meshes_are_replicas_where_they_are_equal() -> None:
    places = [((part,), mesh) for part in (0, 1) for mesh in ((0, 2), (1, 3))]
    equal, stages = (
        [tensor(digest, *place) for digest, place in zip(digests, places, strict=True)]
        for digests in ("aabb", "axby")
    )
    assert alike(*equal) == [((0, 1),), ((2, 3),)]
    assert str(compare(dict(enumerate(stages)))) == "sharded: every rank holds a part of its own"


def test_comparisons_are_described_in_words() -> None:
    words = {
        LargestDifference(0.125, False): "by up to 0.125",
        LargestDifference(0.125, True): "by at least 0.125",
        LargestDifference(math.inf, False): "by a NaN or an infinity",
        LargestDifference(0.0, False): "in bits, not in value",
        LargestDifference(0.0, True): "in no element that was compared",
    }
    for difference, text in words.items():
        comparison = Comparison((Replicas((), ((0, 1), (2,)), difference),))
        assert str(comparison) == f"replicas differ: ranks 0-1 ≠ 2 {text}"
    unread = compare({0: tensor("a"), 1: tensor(""), 2: tensor("b")})
    assert str(unread) == "replicas differ: ranks 0 ≠ 2; not compared: 1"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=5),
    st.integers(1, 20),
)
def test_parts_are_cut_without_a_gap(lengths: list[tuple[int, int]], num_parts: int) -> None:
    parts = [(100 * at + gap, 100 * at + gap + length) for at, (gap, length) in enumerate(lengths)]
    found = split(parts, num_parts)
    wanted = [i for begin, end in parts for i in range(begin, end)]
    assert [i for begin, end in found for i in range(begin, end)] == wanted
    assert size_of(found) == len(wanted)
    assert len(found) <= num_parts + len(parts)
    digests = [[str(i) for i, _ in enumerate(found)], ["0", *"x" * (len(found) - 1)]]
    assert differing(found, digests) == tuple(found[1:])


NUMBERS = np.array([1.0, math.nan, math.inf, -0.0])


def integers(*values: int, dtype: torch.dtype = torch.int64) -> Any:
    return elements_of_parts(torch.tensor(values, dtype=dtype), ((0, len(values)),)).numpy()


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ([NUMBERS, NUMBERS.copy()], 0.0),
        ([NUMBERS, np.array([1.5, math.nan, math.inf, 0.0]), NUMBERS], 0.5),
        ([NUMBERS, np.array([1.0, 2.0, math.inf, 0.0])], math.inf),
        ([NUMBERS, np.array([1.0, math.nan, -math.inf, 0.0])], math.inf),
        ([np.array([3 + 4j]), np.array([0j])], 5.0),
        ([integers(2**62, 5), integers(2**62 + 3, 5)], 3.0),
        ([integers(2**63 + step, dtype=torch.uint64) for step in (5, 2)], 3.0),
    ],
)
def test_the_largest_difference_is_of_any_to_the_first(values: Any, difference: float) -> None:
    assert largest_difference(values) == difference


# ---- inspections


def inspection(*items: tuple[str, TensorSummary]) -> Inspection:
    found = ValueSummary("dict", "{...}", tuple(facts.at(path) for path, facts in items))
    return Inspection("x", {0: found, 1: found}, {2: Refusal("NameError", "no x")})


def test_an_inspection_of_one_tensor_is_its_facts_by_rank() -> None:
    one = inspection(("", tensor("a")))
    assert dict(one) == {0: tensor("a"), 1: tensor("a")}
    assert one.is_one
    assert "ranks 0-1: torch.Tensor float32 (2,)" in repr(one)
    assert "rank 2: NameError: no x" in repr(one)
    with pytest.raises(KeyError, match="NameError: no x"):
        one[2]
    with pytest.raises(KeyError, match="was not asked"):
        one[3]


def test_an_inspection_of_a_nest_has_facts_by_path() -> None:
    nest = inspection(("a", tensor("a")), ("b", tensor("b")))
    assert not nest.is_one
    assert nest.paths == ("a", "b")
    assert nest.facts_of("b") == dict.fromkeys((0, 1), tensor("b").at("b"))
    assert nest.facts_of("c") == {}
    assert (nest[0].kind, nest[0].text) == ("dict", "{...}")
