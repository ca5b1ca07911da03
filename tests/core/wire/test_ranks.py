"""Sets of ranks as people write them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import MeshUsageError
from cellmesh.wire.ranks import (
    describe_groups,
    describe_ranks,
    format_ranks,
    group_ranks,
    parse_ranks,
)

SETS = st.sets(st.integers(0, 40), min_size=1)


@given(SETS)
def test_formatted_ranks_are_parsed_back(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), 41) == tuple(sorted(ranks))


@given(SETS)
def test_runs_are_written_as_spans(ranks: set[int]) -> None:
    parts = format_ranks(ranks).split(",")
    ends = [tuple(map(int, part.split("-"))) for part in parts]
    # Neighbouring spans leave a gap between them, or they would be one.
    assert all(a[-1] + 1 < b[0] for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 2, 3, 4], "0,2-5"), ([1, 1, 1], "1")],
)
def test_format_examples(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        (" 3 , 1 ", (1, 3)),
        ("1-1", (1,)),
        ("0-3,2,2", (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        (" all ", (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_parse_examples(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 8) == ranks


@pytest.mark.parametrize(
    "text", ["", " ", ",", "0,", "x", "-1", "0--2", "1-", "-", "0x1", "1.0", "none", "0 1"]
)
def test_invalid_sets_of_ranks_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshUsageError, match=r"write it like 0,2-3 \(ranks are 0-7\)"):
        parse_ranks(text, 8)


@pytest.mark.parametrize("text", ["8", "0-8", "0,9", "0-99999999999999999999"])
def test_a_rank_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(MeshUsageError, match=r"there is no rank \d+: the mesh has 8, 0-7"):
        parse_ranks(text, 8)


def test_a_backward_span_is_refused_with_the_forward_one() -> None:
    with pytest.raises(MeshUsageError, match="'3-1' runs backwards: write 1-3"):
        parse_ranks("0,3-1", 8)


@given(st.text(max_size=12), st.integers(1, 8))
def test_any_text_is_a_set_of_the_mesh_or_a_usage_error(text: str, world_size: int) -> None:
    try:
        ranks = parse_ranks(text, world_size)
    except MeshUsageError:
        return
    assert ranks
    assert list(ranks) == sorted(set(ranks))
    assert set(ranks) <= set(range(world_size))


def test_ranks_in_a_sentence() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([0, 1, 2, 4]) == "ranks 0-2,4"
    assert describe_ranks([0, 1]) == "ranks 0-1"


def test_group_ranks_with_equal_answers() -> None:
    assert group_ranks({0: "b", 2: "a", 1: "b"}) == {"b": (0, 1), "a": (2,)}
    assert list(group_ranks({3: "b", 0: "a"})) == ["b", "a"]


def test_describe_groups_without_text() -> None:
    assert describe_groups({0: "cold", 1: "", 2: "cold", 3: "hot"}) == [
        "ranks 0,2: cold",
        "rank 3: hot",
    ]
