"""Differences of replicas: brought together from ranks, put into words."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.controller.replicas import CheckReport, Difference, bring_together
from cellmesh.wire.replicas import Distance, Entry


def entry(path: str, digest: str, ranks: tuple[int, ...] = (), **more: Any) -> Entry:
    return Entry(path=path, kind=more.pop("kind", "parameter"), digest=digest, ranks=ranks, **more)


# ---- bringing together


def test_equal_replicas_are_equal() -> None:
    report = bring_together(
        "m", {rank: [entry("m.w", "a"), entry("m.b", "b")] for rank in range(4)}
    )
    assert report.equal
    assert report.num_compared == 2
    assert "replicas are equal, bit for bit" in repr(report)


@pytest.mark.parametrize(
    ("digests", "groups", "words"),
    [
        ("baaa", ((1, 2, 3), (0,)), "ranks 1-3 ≠ rank 0"),
        ("abab", ((0, 2), (1, 3)), "ranks 0,2 ≠ ranks 1,3"),
    ],
)
def test_the_ranks_that_differ_are_named_the_most_first(
    digests: str, groups: Any, words: str
) -> None:
    everyone = (0, 1, 2, 3)
    report = bring_together("m", {r: [entry("m.w", digests[r], everyone)] for r in everyone})
    (found,) = report.differences
    assert not report.equal
    assert (found.groups, found.describe_ranks()) == (groups, words)
    assert report.notes() == [f"`%dist_sync m --from {groups[0][0]}` makes replicas equal"]


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ("aabb", "not wrapped: different along dp, equal along tp"),
        ("abab", "not wrapped: equal along dp, different along tp"),
        ("abba", "not wrapped: different along dp, different along tp"),
    ],
)
def test_values_that_nobody_says_are_replicas_are_compared_along_each_dim(
    digests: str, words: str
) -> None:
    report = bring_together("m", {rank: [entry("m.w", digests[rank])] for rank in range(4)})
    advice = "if they are meant to be equal: `%dist_sync m --from 0` overwrites the others"
    assert report.notes() == [advice]
    with_dims = dataclasses.replace(report, dims={"dp": 2, "tp": 2})
    assert with_dims.notes() == [words, advice]


def test_only_ranks_that_should_hold_the_same_are_compared() -> None:
    held = {0: ("a", (0, 2)), 1: ("b", (1, 3)), 2: ("a", (0, 2)), 3: ("c", (1, 3))}
    report = bring_together("", {rank: [entry("m.w", d, r)] for rank, (d, r) in held.items()})
    (found,) = report.differences
    assert found.groups == ((1,), (3,))


def test_parts_of_their_own_are_not_compared() -> None:
    report = bring_together("m", {rank: [entry("m.w", str(rank), (rank,))] for rank in range(2)})
    assert report.equal
    assert (report.num_compared, report.num_alone) == (0, 1)
    assert "there are no replicas to compare" in repr(report)


def test_check_of_a_single_rank_is_reported() -> None:
    assert "one rank has nothing" in repr(bring_together("m", {2: [entry("m.w", "a", (0, 1, 2))]}))


def test_check_without_wrapped_models_is_reported() -> None:
    report = bring_together("", {r: [Entry(path="net", kind="not wrapped")] for r in range(2)})
    assert "no wrapped model" in repr(report)
    assert "name it to compare it: net" in repr(report)


def test_a_missing_tensor_is_a_difference() -> None:
    report = bring_together("m", {0: [entry("m.w", "a")], 1: [], 2: [entry("m.w", "a")]})
    (found,) = report.differences
    assert (found.missing, found.groups) == ((1,), ((0, 2),))
    assert "missing on rank 1" in repr(report)


def test_different_shapes_or_values_are_shown_with_both() -> None:
    shapes = {r: [entry("m.w", str(r), shape=(r,), dtype="int8")] for r in (1, 2)}
    (found,) = bring_together("m", shapes).differences
    assert found.describe() == "(1,) int8 on rank 1, (2,) int8 on rank 2"
    values = {r: [entry("o.lr", str(r), kind="number", text=f"0.{r}")] for r in (1, 2)}
    (found,) = bring_together("o", values).differences
    assert found.describe() == "0.1 on rank 1, 0.2 on rank 2"


def test_values_that_may_differ_are_listed_and_no_difference() -> None:
    more = {"kind": "rng", "why_differs": "as it should be"}
    report = bring_together("", {r: [entry("rng.torch", str(r), **more)] for r in range(2)})
    assert report.equal
    assert "rng.torch differ, as they may: as it should be" in repr(report)


def test_values_without_a_digest_are_not_called_equal() -> None:
    report = bring_together("m", {r: [entry("m.sparse", "")] for r in range(2)})
    assert report.not_readable == ("m.sparse",)
    assert "cannot be read: m.sparse" in repr(report)


def test_many_differences_are_bounded() -> None:
    entries = {r: [entry(f"m.{i}", str(r)) for i in range(500)] for r in range(2)}
    report = bring_together("m", entries)
    assert len(report.differences) == 500
    assert len(repr(report).splitlines()) == 13
    assert "490 more" in repr(report)


def test_distance_is_described_in_words() -> None:
    facts = {"max_abs": 0.25, "first_index": (1, 2), "ours": "1", "theirs": "2"}
    found = Distance(num_differing=3, num_elements=1200, **facts)  # type: ignore[arg-type]
    difference = Difference("m.w", "parameter", ((0, 1), (2,)), "elements", distances={2: found})
    text = "rank 2: 3 of 1,200 elements, up to 0.25 apart; first at [1, 2]: 1 there, not 2"
    assert difference.describe() == text
    zeros = {1: Distance(num_differing=0, num_elements=4)}
    difference = Difference("w", "tensor", ((0,), (1,)), "", distances=zeros)
    assert "sign of zeros" in difference.describe()


def test_the_report_shows_itself_as_html() -> None:
    report = bring_together("m", {r: [entry("m.<b>", str(r))] for r in range(2)})
    shown = report._repr_html_()
    assert "m.&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert "<table" not in CheckReport("m", (0, 1), 3)._repr_html_()


@pytest.fixture(autouse=True)
def _numbers_as_they_were() -> Iterator[None]:
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()
    yield
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    sys.modules["numpy"].random.set_state(states[2])
