"""Whether replicas are equal, and by how much not; what an inspection says of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.inspect.query import Inspection
from cellmesh.controller.inspect.replica_diff import (
    Comparison,
    LargestDifference,
    Replicas,
    compare,
    differing,
    largest_difference,
    size_of,
    split,
)
from cellmesh.wire.inspect import Refusal, TensorSummary, ValueSummary
from cellmesh.workers.inspect.chunks import sample_of_parts


def tensor(
    digest: str, shard: tuple[int, ...] = (), mesh: tuple[int, ...] = (), **changes: Any
) -> TensorSummary:
    kind, shape = "torch.Tensor", (2,)
    usual = {"kind": kind, "shape": shape, "local_shape": shape, "dtype": "float32"}
    return TensorSummary(**{**usual, **changes}, digest=digest, shard=shard, mesh_ranks=mesh)  # type: ignore[arg-type]


def alike(*facts: TensorSummary) -> list[tuple[tuple[int, ...], ...]]:
    return [each.alike for each in compare(dict(enumerate(facts))).replicas]


def test_ranks_with_the_same_digest_are_alike() -> None:
    assert alike(tensor("a"), tensor("b"), tensor("a")) == [((0, 2), (1,))]


def test_the_same_bytes_in_another_shape_or_type_are_not_the_same() -> None:
    assert alike(tensor("a"), tensor("a", local_shape=(2, 1))) == [((0,), (1,))]
    assert alike(tensor("a"), tensor("a", dtype="int32")) == [((0,), (1,))]
    assert alike(tensor("a"), tensor("a", kind="torch.nn.parameter.Parameter")) == [((0, 1),)]
    plain = {"shape": None, "local_shape": None, "dtype": ""}
    assert alike(tensor("a", kind="int", **plain), tensor("a", kind="str", **plain)) == [
        ((0,), (1,))
    ]


def test_parts_of_different_meshes_are_replicas_where_they_are_equal() -> None:
    places = [((part,), mesh) for part in (0, 1) for mesh in ((0, 2), (1, 3))]
    equal, stages = (
        [tensor(digest, *place) for digest, place in zip(digests, places, strict=True)]
        for digests in ("aabb", "axby")
    )
    assert alike(*equal) == [((0, 1),), ((2, 3),)]
    assert str(compare(dict(enumerate(stages)))) == "sharded: every rank holds a part of its own"


def test_comparison_names_unreadable_parts() -> None:
    comparison = compare({0: tensor("a"), 1: tensor(""), 2: tensor("b")})
    assert comparison.unread == (1,)
    assert str(comparison) == "replicas differ: ranks 0 ≠ 2; not compared: 1"
    unread = str(compare({0: tensor("a"), 1: tensor("")}))
    assert unread == "not compared: not all of it can be read"


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (LargestDifference(0.125, False), "by up to 0.125"),
        (LargestDifference(0.125, True), "by at least 0.125"),
        (LargestDifference(math.inf, False), "by a NaN or an infinity"),
        (LargestDifference(0.0, False), "in bits, not in value"),
        (LargestDifference(0.0, True), "in no element that was compared"),
    ],
)
def test_differences_are_described_in_words(difference: LargestDifference, words: str) -> None:
    comparison = Comparison((Replicas((), ((0, 1), (2,)), difference),))
    assert str(comparison) == f"replicas differ: ranks 0-1 ≠ 2 {words}"


# ---- narrowing down


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=5),
    st.integers(1, 20),
)
def test_runs_are_cut_without_a_gap(lengths: list[tuple[int, int]], num_parts: int) -> None:
    parts, at = [], 0
    for gap, length in lengths:
        parts.append((at + gap, at + gap + length))
        at += gap + length
    found = split(parts, num_parts)
    assert [i for begin, end in found for i in range(begin, end)] == [
        i for begin, end in parts for i in range(begin, end)
    ]
    assert size_of(found) == size_of(parts)
    assert len(found) <= num_parts + len(parts)


def test_only_runs_that_differ_are_kept() -> None:
    parts = ((0, 3), (3, 6), (6, 9))
    assert differing(parts, [["a", "b", "c"], ["a", "x", "c"], ["a", "b", "y"]]) == ((3, 6), (6, 9))


NUMBERS = np.array([1.0, math.nan, math.inf, -0.0])


@pytest.mark.parametrize(
    ("others", "difference"),
    [
        ([NUMBERS.copy()], 0.0),
        ([np.array([1.5, math.nan, math.inf, 0.0]), NUMBERS], 0.5),
        ([np.array([1.0, 2.0, math.inf, 0.0])], math.inf),
        ([np.array([1.0, math.nan, -math.inf, 0.0])], math.inf),
    ],
)
def test_the_largest_difference_is_of_any_to_the_first(
    others: list[Any], difference: float
) -> None:
    assert largest_difference([NUMBERS, *others]) == difference


def test_complex_numbers_differ_by_their_distance() -> None:
    assert largest_difference([np.array([3 + 4j]), np.array([0j])]) == 5.0


def test_large_integers_are_compared_as_such() -> None:
    one, other = (
        sample_of_parts(torch.tensor([2**62 + step, 5]), ((0, 2),), 9).numpy() for step in (0, 3)
    )
    assert largest_difference([one, other]) == 3.0
    unsigned = [torch.tensor([2**63 + step], dtype=torch.uint64) for step in (5, 2)]
    assert largest_difference([sample_of_parts(x, ((0, 1),), 9).numpy() for x in unsigned]) == 3.0


# ---- inspections


def inspection(*items: tuple[str, TensorSummary], **refused: str) -> Inspection:
    found = ValueSummary("dict", "{...}", tuple(facts.at(path) for path, facts in items))
    return Inspection("x", {0: found, 1: found}, {2: Refusal("NameError", "no x")})


def test_an_inspection_of_one_tensor_is_its_facts_by_rank() -> None:
    one = inspection(("", tensor("a")))
    assert dict(one) == {0: tensor("a"), 1: tensor("a")}
    assert one.is_one
    assert "ranks 0-1: torch.Tensor float32 (2,)" in repr(one)
    assert "rank 2: NameError: no x" in repr(one)


def test_an_inspection_of_unlike_values_names_each_with_its_ranks() -> None:
    text = ValueSummary("str", "'str'", (TensorSummary(kind="str", text="'str'").at(""),))
    one = ValueSummary("torch.Tensor", "", (tensor("a").at(""),))
    shown = repr(Inspection("y", {0: text, 1: one, 2: one}))
    assert shown == "<y on rank 0: str 'str'; on ranks 1-2: torch.Tensor float32 (2,)>"


def test_an_inspection_of_a_nest_has_facts_by_path() -> None:
    nest = inspection(("a", tensor("a")), ("b", tensor("b")))
    assert not nest.is_one
    assert nest.paths == ("a", "b")
    assert nest.facts_of("b") == dict.fromkeys((0, 1), tensor("b").at("b"))
    assert nest.facts_of("c") == {}
    assert (nest[0].kind, nest[0].text) == ("dict", "{...}")


def test_rank_without_a_value_gives_its_reason() -> None:
    one = inspection(("", tensor("a")))
    with pytest.raises(KeyError, match="NameError: no x"):
        one[2]
    with pytest.raises(KeyError, match="was not asked"):
        one[3]
    assert one.get(2) is None
