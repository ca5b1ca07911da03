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
    with_verb,
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


@given(st.text(max_size=12), st.integers(1, 8))
def test_any_text_is_a_set_of_the_mesh_or_a_usage_error(text: str, world_size: int) -> None:
    try:
        ranks = parse_ranks(text, world_size)
    except MeshUsageError:
        return
    assert ranks
    assert list(ranks) == sorted(set(ranks))
    assert set(ranks) <= set(range(world_size))


def test_format_examples() -> None:
    texts = {(): "", (3,): "3", (0, 1): "0-1", (5, 0, 2, 3, 4): "0,2-5", (1, 1, 1): "1"}
    assert {ranks: format_ranks(ranks) for ranks in texts} == texts


def test_parse_examples() -> None:
    every = tuple(range(8))
    sets = {"0": (0,), "0,2-3": (0, 2, 3), " 3 , 1 ": (1, 3), "1-1": (1,), "0-3,2,2": (0, 1, 2, 3)}
    sets |= {"all": every, " all ": every}
    assert {text: parse_ranks(text, 8) for text in sets} == sets


NO_SETS = ["", " ", ",", "0,", "x", "-1", "0--2", "1-", "-", "0x1", "1.0", "none", "0 1"]
REFUSED = {
    **dict.fromkeys(NO_SETS, r"write it like 0,2-3 \(ranks are 0-7\)"),
    **dict.fromkeys(
        ["8", "0-8", "0,9", "0-99999999999999999999"],
        r"there is no rank \d+: the mesh has 8, 0-7",
    ),
    "0,3-1": "'3-1' runs backwards: write 1-3",
}


@pytest.mark.parametrize(("text", "why"), REFUSED.items())
def test_what_is_no_set_of_ranks_is_refused(text: str, why: str) -> None:
    with pytest.raises(MeshUsageError, match=why):
        parse_ranks(text, 8)


def test_ranks_in_a_sentence() -> None:
    texts = {(3,): "rank 3", (0, 1, 2, 4): "ranks 0-2,4", (0, 1): "ranks 0-1"}
    assert {ranks: describe_ranks(ranks) for ranks in texts} == texts
    assert [with_verb(ranks, "is", "are") for ranks in ([3], [0, 1])] == [
        "rank 3 is",
        "ranks 0-1 are",
    ]


def test_ranks_are_grouped_by_equal_answers() -> None:
    assert group_ranks({0: "b", 2: "a", 1: "b"}) == {"b": (0, 1), "a": (2,)}
    assert list(group_ranks({3: "b", 0: "a"})) == ["b", "a"]
    texts = describe_groups({0: "cold", 1: "", 2: "cold", 3: "hot"})
    assert texts == ["ranks 0,2: cold", "rank 3: hot"]
