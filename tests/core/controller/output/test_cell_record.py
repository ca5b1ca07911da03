"""The record of an output area: bounded, fair between ranks, each display in its latest state."""

from __future__ import annotations

import math

from cellmesh.controller.output.cell_record import Record, RecordEntry, share
from cellmesh.controller.output.fold import Line, Rich


def line(*ranks: int, text: str = "text") -> RecordEntry:
    return RecordEntry(ranks, Line("stdout", text))


def texts(record: Record, rank: int) -> list[str]:
    return [item.text for item in record.by_rank()[rank].items if isinstance(item, Line)]


def test_each_rank_has_what_it_shared_and_what_is_its_own() -> None:
    record = Record()
    for entry in (line(0, 1, text="all"), line(1, text="one"), line(0, 1, text="end")):
        record.add(entry)
    assert (texts(record, 0), texts(record, 1)) == (["all", "end"], ["all", "one", "end"])


def test_a_remark_is_nobodys() -> None:
    record = Record()
    record.add(line(text="remark"))
    assert record.by_rank() == {}
    assert record.cost_of_others((0, 1)) == 0


def test_a_display_is_replaced_where_it_stands() -> None:
    record = Record()
    record.add(RecordEntry((0,), Rich("display", b"1"), "a"))
    record.add(line(0))
    record.replace(RecordEntry((0,), Rich("display", b"2"), "a"))
    record.replace(RecordEntry((0,), Rich("display", b"3"), "of another cell"))
    assert record.by_rank()[0].items == (Rich("display", b"2"), Line("stdout", "text"))


def test_clearing_one_rank_leaves_the_others() -> None:
    record = Record()
    record.add(line(0, 1, 2, text="all"))
    record.add(line(1, text="one"))
    record.clear((0, 1))
    assert record.by_rank().keys() == {2}
    assert 0 < record.cost_of_others((0, 1)) < 1000
    assert record.cost_of_others((2,)) == 0


def test_a_flood_is_bounded_and_costs_only_who_floods() -> None:
    record = Record(budget_bytes=10_000)
    record.add(line(1, text="kept"))
    for number in range(10_000):
        record.add(line(0, text=f"{number}"))
    assert sum(entry.num_bytes for entry in record.entries) <= 20_000
    assert texts(record, 1) == ["kept"]
    assert texts(record, 0)[-1] == "9999"
    assert record.by_rank()[0].dropped
    assert not record.by_rank()[1].dropped


def test_ranks_that_lost_the_same_are_still_equal() -> None:
    record = Record(budget_bytes=10_000)
    for number in range(2_000):
        record.add(line(0, 1, text=f"{number}"))
    by_rank = record.by_rank()
    assert by_rank[0] == by_rank[1]
    assert by_rank[0].dropped


def test_output_larger_than_the_record_is_not_kept() -> None:
    record = Record(budget_bytes=1_000)
    record.add(line(0, text="x" * 1_000_000))
    assert record.by_rank()[0].items == ()
    assert record.by_rank()[0].dropped


def test_record_is_empty_when_switched_off() -> None:
    record = Record()
    record.add(line(0))
    record.switch_off()
    record.add(line(0))
    assert record.by_rank() == {}
    record.add(line(1))
    assert record.cost_of_others((0, 1)) == 0
    assert record.cost_of_others((0,)) == record.cost_of_others((1,)) == math.inf


def test_dropped_output_of_other_ranks_is_not_shown_again() -> None:
    record = Record(budget_bytes=1_000)
    record.add(line(0, text="x" * 10_000))
    record.add(line(1))
    assert record.cost_of_others((1,)) == math.inf
    assert record.cost_of_others((0,)) < 1_000
    record.clear((0,))
    assert record.cost_of_others((1,)) == 0


def test_shares() -> None:
    assert share([], 100) == float("inf")
    assert share([10, 20], 100) == float("inf")
    assert share([10, 200, 300], 100) == 45
