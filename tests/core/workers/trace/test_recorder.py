"""What a rank keeps of what it did."""

from __future__ import annotations

import collections
import math
import time
from types import SimpleNamespace

import pytest

from cellmesh.controller.trace.history import merge
from cellmesh.wire.inspect import HistoryQuery
from cellmesh.wire.trace import RECORD, Past, What
from cellmesh.workers.run_tracker import MAX_RUNS, RunRecord, RunTracker
from cellmesh.workers.trace import recorder as module
from cellmesh.workers.trace.recorder import CAPACITY, Spans, Stopwatch

REDUCE, BARRIER = What("all_reduce", "0", (), 0), What("barrier", "1", (0, 2), 3)


def begin(spans: Spans, sequence: int = 1, what: What = REDUCE, is_sync: bool = True) -> int:
    return spans.begin(what, sequence, -1, time.monotonic(), is_sync)


def begin_cell(spans: Spans, run: int, name: str, execution_count: int) -> None:
    spans._cells.append(RunRecord(run, name, execution_count, time.monotonic()))


def end_cell(spans: Spans) -> None:
    spans._cells[-1].end_s = time.monotonic()


def past(spans: Spans, **options: int) -> Past:
    return spans.past(HistoryQuery(**options))


def names(told: Past) -> list[str]:
    return [told.whats[index].name for index in told.what]


def columns(told: Past) -> SimpleNamespace:
    """The numbers of operations, by what they mean."""
    rows = list(RECORD.iter_unpack(told.numbers))
    fields = ("sequence", "peer", "run", "begin_s", "end_s", "wait_s")
    return SimpleNamespace(**{name: [row[at] for row in rows] for at, name in enumerate(fields)})


def test_cell_and_its_collectives_are_recorded_with_begin_and_end() -> None:
    spans = Spans()
    begin_cell(spans, 7, "", 3)
    spans.end(begin(spans, 1))
    spans.end(begin(spans, 2, BARRIER))
    end_cell(spans)
    told = past(spans)
    (cell,) = told.cells
    assert (cell.run, cell.execution_count) == (7, 3)
    assert cell.end_s is not None
    ops = columns(told)
    assert (names(told), told.whats[1]) == (["all_reduce", "barrier"], BARRIER)
    assert (ops.run, ops.sequence, ops.wait_s) == ([7, 7], [1, 2], ops.begin_s)
    times = [cell.begin_s, ops.begin_s[0], ops.end_s[0], ops.begin_s[1]]
    times += [ops.end_s[1], cell.end_s, told.now_s]
    assert times == sorted(times)


@pytest.fixture
def spans() -> Spans:
    """Those of a rank whose first cell runs."""
    made = Spans()
    begin_cell(made, 1, "", 1)
    return made


def test_open_operation_has_no_end_and_an_end_counts_once(spans: Spans) -> None:
    number = begin(spans, is_sync=False)
    told = past(spans)
    assert told.cells[0].end_s is None
    assert math.isnan(columns(told).end_s[0])
    assert math.isnan(columns(told).wait_s[0])
    spans.wait(number)
    spans.end(number)
    first = columns(past(spans))
    spans.wait(number)
    spans.end(number)
    spans.end_all()
    assert columns(past(spans)) == first
    assert first.begin_s[0] <= first.wait_s[0] <= first.end_s[0]


def test_the_ring_keeps_the_newest_and_says_how_many_are_gone(spans: Spans) -> None:
    first = begin(spans)
    for sequence in range(2, CAPACITY + 101):
        spans.end(begin(spans, sequence))
    spans.end(first)  # its place has another's numbers
    spans.wait(first)
    told = past(spans, max_operations=10 * CAPACITY)
    # One less than fit: the place of the oldest may be just being written.
    assert list(columns(told).sequence) == list(range(102, CAPACITY + 101))
    assert told.num_left_out == 101
    assert len(spans._what) == CAPACITY
    few = past(spans, max_operations=5)
    assert list(columns(few).sequence) == list(range(CAPACITY + 96, CAPACITY + 101))
    assert few.num_left_out == CAPACITY + 95


def test_only_the_last_cells_are_returned_without_the_work_between() -> None:
    spans = Spans(RunTracker().records)
    for run in range(MAX_RUNS + 5):
        begin_cell(spans, run, f"call{run}", 0)
        begin(spans, run + 1)
        end_cell(spans)
        begin(spans, run + 1, BARRIER)
    told = past(spans, num_cells=3)
    assert [cell.name for cell in told.cells] == [
        f"call{run}" for run in range(MAX_RUNS + 2, MAX_RUNS + 5)
    ]
    assert names(told) == ["all_reduce"] * 3
    assert len(past(spans, num_cells=10**6).cells) == MAX_RUNS


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(module, "monotonic", lambda: self.now_s)


def begin_at(spans: Spans, clock: Clock, at_s: float) -> int:
    clock.now_s = at_s
    return spans.begin(REDUCE, 1, -1, at_s, True)


def end_at(spans: Spans, clock: Clock, number: int, at_s: float) -> None:
    clock.now_s = at_s
    spans.end(number)


def test_time_in_collectives_is_that_of_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DDP's operations: they overlap, and some ends are noted after the cell's end."""
    clock = Clock(monkeypatch)
    cells: collections.deque[RunRecord] = collections.deque()
    spans = Spans(cells)
    cells.append(RunRecord(1, "", 1, 0.0))
    before = begin_at(spans, clock, 0.5)
    cells[-1].end_s = 1.0
    stopwatch = Stopwatch(spans)
    clock.now_s = 1.0
    stopwatch.start()
    cells.append(RunRecord(2, "", 2, 1.0))
    first, second = begin_at(spans, clock, 2.0), begin_at(spans, clock, 3.0)
    end_at(spans, clock, before, 3.5)  # begun by the cell before
    end_at(spans, clock, first, 4.0)
    end_at(spans, clock, second, 5.0)
    late = begin_at(spans, clock, 9.0)
    begin_at(spans, clock, 9.5)  # never noted as ended
    cells[-1].end_s = clock.now_s = 10.0
    took = stopwatch.stop()
    end_at(spans, clock, late, 12.0)
    history = merge({0: spans.past(HistoryQuery())}, {}, 5)
    shown = [history.times(0, cell).collectives_ns / 1e9 for cell in history.cells]
    assert shown == [0.5, took.in_collectives_s] == [0.5, 4.0]
