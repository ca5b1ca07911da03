"""How long a cell took, and how long of it collectives were under way."""

from __future__ import annotations

import collections

import pytest

from cellmesh.controller.trace.history import merge
from cellmesh.wire.inspect import HistoryQuery
from cellmesh.wire.trace import What
from cellmesh.workers.run_tracker import RunRecord
from cellmesh.workers.trace import recorder
from cellmesh.workers.trace.recorder import Spans, Stopwatch

REDUCE = What("all_reduce", "0", (), 0)


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(recorder.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(recorder, "monotonic", lambda: self.now_s)


def begin_at(spans: Spans, clock: Clock, at_s: float) -> int:
    clock.now_s = at_s
    return spans.begin(REDUCE, 1, -1, at_s, True)


def end_at(spans: Spans, clock: Clock, number: int, at_s: float) -> None:
    clock.now_s = at_s
    spans.end(number)


def test_time_in_collectives_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spans = Clock(monkeypatch), Spans()
    end_at(spans, clock, begin_at(spans, clock, 0.5), 0.75)  # of an earlier cell
    stopwatch = Stopwatch(spans)
    clock.now_s = 1.0
    stopwatch.start()
    first, second = begin_at(spans, clock, 2.0), begin_at(spans, clock, 3.0)
    end_at(spans, clock, first, 4.0)
    end_at(spans, clock, second, 5.0)
    begin_at(spans, clock, 9.0)  # goes on when the cell ends
    clock.now_s = 10.0
    took = stopwatch.stop()
    assert (took.elapsed_s, took.in_collectives_s) == (9.0, 4.0)


def test_collectives_that_were_overwritten_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CAPACITY", 4)
    clock, spans = Clock(monkeypatch), Spans()
    stopwatch = Stopwatch(spans)
    stopwatch.start()
    for index in range(10):
        end_at(spans, clock, begin_at(spans, clock, index), index + 0.5)
    assert stopwatch.stop().in_collectives_s == 5.0
    assert spans.before_overwriting is None


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


def test_timing_adds_up_only_in_timed_cells() -> None:
    assert Spans().before_overwriting is None
