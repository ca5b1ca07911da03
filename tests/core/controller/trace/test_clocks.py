"""Records of ranks on hosts whose clocks differ, on one clock."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

from cellmesh.controller.core.clocks import ClockOffset
from cellmesh.controller.trace.chrome import merge_traces, trace_of
from cellmesh.controller.trace.history import merge
from cellmesh.controller.trace.profile import profile_of
from cellmesh.wire.trace import RECORD, CellSpan, Past, RankProfile, What

S = 10**9
NAN = float("nan")
AHEAD_S = 182_034.25
ALL = What("all_reduce", "0", (), 0)
NEAR, FAR = ClockOffset("a", 0.0, 1e-4), ClockOffset("b", AHEAD_S, 2e-4)


def past(ahead_s: float, begin_s: float) -> Past:
    """A cell from 10 to 13 and an all_reduce that goes on, on a clock that is ahead."""
    numbers = RECORD.pack(1, -1, 4, begin_s + ahead_s, NAN, begin_s + ahead_s)
    cells = (
        CellSpan(3, "", 1, 2 + ahead_s, 3 + ahead_s),
        CellSpan(4, "", 2, 10 + ahead_s, 13 + ahead_s),
    )
    return Past(cells, (ALL,), array("i", [0]), numbers, 0, 1 + ahead_s, 20 + ahead_s)


def test_late_rank_of_another_host_is_late_by_our_clock() -> None:
    """Without the offset, its cell would be two days after those of the others."""
    pasts = {0: past(0, 10.5), 1: past(0, 10.5), 2: past(AHEAD_S, 12)}
    history = merge(pasts, {}, 1, {0: NEAR, 1: NEAR, 2: FAR})
    assert history.cells[0].by_rank == dict.fromkeys(range(3), (0, 3 * S))
    [theirs] = history.operations[2]
    assert (theirs.start_ns, theirs.wait_ns, theirs.end_ns) == (2 * S, 2 * S, 3 * S)
    assert history.lateness()[2].awaited_s == 3.0
    assert history.straggler == 2
    assert history.notes == (
        "clocks of hosts, against the notebook's: a: +0.0000 s ± 0.1 ms, b: +182,034.2500 s ± 0.2 "
        "ms",
    )
    clocks = json.loads(trace_of(history))["otherData"]["clocks"]
    assert clocks["rank 2"] == {"host": "b", "offset_s": AHEAD_S, "error_s": 2e-4}


def test_clocks_of_one_host_are_not_mentioned() -> None:
    history = merge({0: past(0, 10.5)}, {}, 1)
    assert history.notes == ()
    assert "otherData" not in json.loads(trace_of(history))


def test_ranks_that_began_later_are_not_missed_by_our_clock() -> None:
    new = replace(past(AHEAD_S, 12), cells=(), what=array("i"), numbers=b"", since_s=AHEAD_S + 11)
    history = merge({0: past(0, 10.5), 1: new}, {}, 1, {1: FAR})
    assert history.operations[0][0].missing == ()
    new = replace(new, since_s=AHEAD_S + 10.25)
    assert merge({0: past(0, 10.5), 1: new}, {}, 1, {1: FAR}).operations[0][0].missing == (1,)


def test_a_profiled_gpus_work_is_on_our_clock() -> None:
    theirs = RankProfile(past=past(AHEAD_S, 12), busy=((AHEAD_S + 11, AHEAD_S + 11.5),))
    history = profile_of({0: RankProfile(past=past(0, 11)), 1: theirs}, {}, {1: FAR}).history
    assert history.computing(1, history.cells[0]) == [(S, 3 * S // 2)]
    assert history.computing(0, history.cells[0]) == [(0, S)]
    assert history.lateness()[1].awaited_s == 1.0


def test_merged_trace_is_on_one_clock() -> None:
    """The other host's monotonic clock is 200 s ahead, and its system clock was set wrong: 800 s
    behind ours.
    """

    def trace(at_us: float) -> bytes:
        event = {"ph": "X", "name": "mm", "pid": 7, "tid": 7, "ts": at_us, "dur": 1}
        return json.dumps({"baseTimeNanoseconds": 5 * S, "traceEvents": [event]}).encode()

    traces = {0: trace(1000e6), 1: trace(402e6)}
    clocks = {0: NEAR, 1: ClockOffset("b", 200.0, 1e-4)}
    merged = json.loads(merge_traces(traces, clocks, {0: 900 * S, 1: 100 * S}))
    begins = {event["pid"]: event["ts"] for event in merged["traceEvents"] if event["ph"] == "X"}
    assert begins == {0: 0, 1: 2e6}
    assert merged["otherData"]["clocks"]["rank 1"]["offset_s"] == 200.0
