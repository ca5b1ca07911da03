"""Inspecting ranks: their answers, and comparisons of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.inspect import (
    Inspection,
    compare,
)
from cellmesh.wire.inspect import Refusal, TensorSummary, ValueSummary

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
    unequal = "replicas differ: ranks 0 ≠ 2 (%dist_check measures them)"
    assert str(compare({0: tensor("a"), 2: tensor("b")})) == unequal
    unread = compare({0: tensor("a"), 1: tensor(""), 2: tensor("b")})
    assert str(unread) == f"{unequal}; not compared: 1"


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
