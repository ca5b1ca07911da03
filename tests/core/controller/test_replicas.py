"""Differences of replicas: brought together from ranks, put into words."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.replicas import CheckReport, Difference, bring_together
from cellmesh.wire.replicas import Distance, Entry


def entry(digest: str, ranks: tuple[int, ...] = (), path: str = "m.w", **more: Any) -> Entry:
    return Entry(path=path, kind=more.pop("kind", "parameter"), digest=digest, ranks=ranks, **more)


def report_of(*digests: str, expression: str = "m", **more: Any) -> CheckReport:
    """The report on ranks of which each holds an entry with one of the digests."""
    return bring_together(expression, {r: [entry(d, **more)] for r, d in enumerate(digests)})


@pytest.mark.parametrize(
    ("digests", "groups", "words"),
    [
        ("baaa", ((1, 2, 3), (0,)), "ranks 1-3 ≠ rank 0"),
        ("abab", ((0, 2), (1, 3)), "ranks 0,2 ≠ ranks 1,3"),
    ],
)
def test_most_of_ranks_that_differ_are_named_first(digests: str, groups: Any, words: str) -> None:
    report = report_of(*digests, ranks=(0, 1, 2, 3))
    (found,) = report.differences
    assert not report.equal
    assert (found.groups, found.describe_ranks()) == (groups, words)
    assert report.notes() == [f"`%dist_sync m --from {groups[0][0]}` makes replicas equal"]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (report_of(*"aaaa"), "m: replicas are equal, bit for bit (1 tensor or value compared)"),
        (bring_together("m", {2: [entry("a", (0, 1, 2))]}), "one rank has nothing"),
        (report_of("", "", expression="", kind="not wrapped"), "no wrapped model"),
        (report_of("", "", kind="not wrapped", path="net"), "name it to compare it: net"),
        (report_of(*"aabb"), "if they are meant to be equal: `%dist_sync m --from 0` overwrites"),
        (report_of("", ""), "cannot be read: m.w"),
        (
            report_of("0", "1", kind="rng", why_differs="as it should be"),
            "m.w differ, as they may: as it should be",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_report_shows_itself(report: CheckReport, text: str) -> None:
    assert text in repr(report)


def test_a_missing_tensor_is_a_difference() -> None:
    report = bring_together("m", {0: [entry("a")], 1: [], 2: [entry("a")]})
    (found,) = report.differences
    assert (found.missing, found.groups) == ((1,), ((0, 2),))
    assert "missing on rank 1" in repr(report)


def test_some_differences_are_shown_with_both_shapes_or_values() -> None:
    shapes = {r: [entry(str(r), shape=(r,), dtype="int8")] for r in (1, 2)}
    (found,) = bring_together("m", shapes).differences
    assert found.describe() == "(1,) int8 on rank 1, (2,) int8 on rank 2"
    values = {r: [entry(str(r), kind="number", text=f"0.{r}")] for r in (1, 2)}
    (found,) = bring_together("o", values).differences
    assert found.describe() == "0.1 on rank 1, 0.2 on rank 2"
    many = {r: [entry(str(r), path=f"m.{i}") for i in range(500)] for r in range(2)}
    shown = repr(bring_together("m", many))
    assert len(shown.splitlines()) == 13
    assert "490 more" in shown


def test_distance_is_described_in_words() -> None:
    places: dict[str, Any] = {"first_index": (1, 2), "ours": "1", "theirs": "2"}
    found = Distance(num_differing=3, num_elements=1200, max_abs=0.25, **places)
    difference = Difference("m.w", "parameter", ((0, 1), (2,)), "elements", distances={2: found})
    text = "rank 2: 3 of 1,200 elements, up to 0.25 apart; first at [1, 2]: 1 there, not 2"
    assert difference.describe() == text
    zeros = {1: Distance(num_differing=0, num_elements=4)}
    difference = Difference("w", "tensor", ((0,), (1,)), "", distances=zeros)
    assert "sign of zeros" in difference.describe()
