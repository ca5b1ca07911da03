"""Values by rank."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.run import Results


@given(st.dictionaries(st.integers(0, 100), st.integers()))
def test_results_are_a_mapping_in_the_order_of_ranks(by_rank: dict[int, int]) -> None:
    results = Results(by_rank)
    assert results == by_rank
    assert list(results) == sorted(by_rank)
    assert results.list == [by_rank[rank] for rank in sorted(by_rank)]
    assert list(results.items()) == sorted(by_rank.items())
    assert len(results) == len(by_rank)


def test_a_rank_without_a_result_is_named_with_those_that_have_one() -> None:
    with pytest.raises(KeyError, match=r"no result of rank 3: there are results of \[0, 2\]"):
        Results({2: "b", 0: "a"})[3]
    assert Results({2: "b"}).get(3) is None
    assert 3 not in Results({2: "b"})


def test_results_show_themselves_by_rank() -> None:
    assert repr(Results({1: "b", 0: "a"})) == "Results({0: 'a', 1: 'b'})"


def test_results_do_not_change_with_their_source() -> None:
    by_rank = {0: 1}
    results = Results(by_rank)
    by_rank[0] = 2
    assert results[0] == 1


def test_results_pickle() -> None:
    results = Results({0: 1, 1: 2})
    copy = pickle.loads(pickle.dumps(results))
    assert type(copy) is Results
    assert copy == results
