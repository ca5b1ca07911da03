"""Sets of ranks as people write them, and intervals of time, against a clock that ticks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import MeshUsageError
from cellmesh.wire.ranks import (
    choose_ranks,
    describe_groups,
    describe_ranks,
    format_ranks,
    group_ranks,
    parse_ranks,
    with_verb,
)
from cellmesh.wire.trace import cut_out, in_operations, join

SETS = st.sets(st.integers(0, 40), min_size=1)


@given(SETS)
def test_formatted_ranks_are_parsed_back(ranks: set[int]) -> None:
    text = format_ranks(ranks)
    assert parse_ranks(text, 41) == tuple(sorted(ranks))
    ends = [tuple(map(int, part.split("-"))) for part in text.split(",")]
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


def test_parse_examples() -> None:
    every = tuple(range(8))
    sets = {"0": (0,), "0,2-3": (0, 2, 3), " 3 , 1 ": (1, 3), "1-1": (1,), "0-3,2,2": (0, 1, 2, 3)}
    sets |= {"all": every, " all ": every}
    assert {text: parse_ranks(text, 8) for text in sets} == sets


NO_SETS = ["", ",", "0,", "-1", "0--2", "1-", "0x1", "0 1"]
REFUSED = {
    **dict.fromkeys(NO_SETS, r"write it like 0,2-3 \(ranks are 0-7\)"),
    **dict.fromkeys(
        ["8", "0-8", "0,9", "0-99999999999999999999"],
        r"there is no rank \d+: the mesh has ranks 0-7",
    ),
    "0,3-1": "'3-1' runs backwards: write 1-3",
}


@pytest.mark.parametrize(("text", "why"), REFUSED.items())
def test_what_is_no_set_of_ranks_is_refused(text: str, why: str) -> None:
    with pytest.raises(MeshUsageError, match=why):
        parse_ranks(text, 8)


def test_ranks_in_a_sentence() -> None:
    assert [describe_ranks(ranks) for ranks in ((3,), (4, 0, 1, 2, 2))] == ["rank 3", "ranks 0-2,4"]
    assert (with_verb([3], "is", "are"), with_verb([0, 1], "is", "are")) == (
        "rank 3 is",
        "ranks 0-1 are",
    )


def test_ranks_are_grouped_by_equal_answers() -> None:
    assert group_ranks({0: "b", 2: "a", 1: "b"}) == {"b": (0, 1), "a": (2,)}
    assert list(group_ranks({3: "b", 0: "a"})) == ["b", "a"]
    texts = describe_groups({0: "cold", 1: "", 2: "cold", 3: "hot"})
    assert texts == ["ranks 0,2: cold", "rank 3: hot"]


_INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def ticks(intervals: list[tuple[int, int]]) -> list[int]:
    return [tick for begin, end in intervals for tick in range(begin, end)]


@given(intervals=_INTERVALS, holes=_INTERVALS)
def test_intervals_without_holes_are_what_a_clock_would_see(
    intervals: list[tuple[int, int]], holes: list[tuple[int, int]]
) -> None:
    left = ticks(cut_out(intervals, holes))
    assert left == sorted(set(ticks(intervals)) - set(ticks(holes)))
    assert in_operations(intervals, -1000, 1000) == len(set(ticks(intervals)))


@given(intervals=_INTERVALS, max_gap=st.integers(0, 10))
def test_joined_intervals_lie_apart_and_cover_what_they_were(
    intervals: list[tuple[int, int]], max_gap: int
) -> None:
    joined = join(intervals, max_gap)
    assert set(ticks(intervals)) <= set(ticks(joined))
    assert all(after - end > max_gap for (_, end), (after, _) in itertools.pairwise(joined))


def test_ranks_of_an_actor_are_chosen_by_position() -> None:
    ranks = (2, 4, 5)
    assert choose_ranks(ranks, -1, "a") == (5,)
    assert choose_ranks(ranks, slice(1, 3), "a") == (4, 5)
    assert choose_ranks(ranks, [0, 2, 0], "a") == (2, 5)
    with pytest.raises(IndexError, match="3: a is on 3 ranks"):
        choose_ranks(ranks, 3, "a")
    with pytest.raises(MeshUsageError, match="chooses none of the 3 ranks of a"):
        choose_ranks(ranks, [], "a")
