"""Records of ranks on hosts whose clocks differ, on one clock."""

from __future__ import annotations

import json
from array import array

from cellmesh.controller.core.clocks import ClockOffset
from cellmesh.controller.trace.chrome import merge_traces, trace_of
from cellmesh.controller.trace.profile import epoch_offsets, profile_on_our_clock
from cellmesh.controller.trace.timeline import merge, past_on_our_clock
from cellmesh.wire.trace import CellSpan, Collective, Operations, Past, RankProfile, What

S = 10**9
NAN = float("nan")
AHEAD_S = 182_034.25
ALL = What("all_reduce", "0", (), 0)
NEAR, FAR = ClockOffset("a", 0.0, 1e-4), ClockOffset("b", AHEAD_S, 2e-4)


def past(ahead_s: float, begin_s: float) -> Past:
    """A cell from 10 to 13 and an all_reduce that goes on, on a clock that is ahead."""
    operations = Operations(
        (ALL,),
        array("i", [0]),
        array("q", [1]),
        array("i", [-1]),
        array("q", [4]),
        array("d", [begin_s + ahead_s]),
        array("d", [NAN]),
        array("d", [begin_s + ahead_s]),
    )
    cells = (
        CellSpan(3, "", 1, 2 + ahead_s, 3 + ahead_s),
        CellSpan(4, "", 2, 10 + ahead_s, 13 + ahead_s),
    )
    return Past(cells, operations, 0, 1 + ahead_s, 20 + ahead_s)


def test_past_is_put_on_our_clock() -> None:
    moved = past_on_our_clock(past(AHEAD_S, 11), FAR)
    assert (moved.cells, moved.since_s, moved.now_s) == (past(0, 11).cells, 1, 20)
    assert (moved.operations.begin_s, moved.operations.wait_s) == (
        array("d", [11]),
        array("d", [11]),
    )
    assert str(moved.operations.end_s[0]) == "nan"


def test_late_rank_of_another_host_is_late_by_our_clock() -> None:
    """Without the offset, its cell would be two days after those of the others."""
    pasts = {0: past(0, 10.5), 1: past(0, 10.5), 2: past(AHEAD_S, 12)}
    history = merge(pasts, {}, 1, {0: NEAR, 1: NEAR, 2: FAR})
    assert history.cells[0].by_rank == dict.fromkeys(range(3), (0, 3 * S))
    assert history.lateness()[2].awaited_s == 3.0
    assert history.straggler == 2
    assert history.notes[-1].endswith("a: +0.0000 s ± 0.1 ms, b: +182,034.2500 s ± 0.2 ms")
    clocks = json.loads(trace_of(history))["otherData"]["clocks"]
    assert clocks["rank 2"] == {"host": "b", "offset_s": AHEAD_S, "error_s": 2e-4}


def test_clocks_of_one_host_are_not_mentioned() -> None:
    history = merge({0: past(0, 10.5)}, {}, 1)
    assert history.notes == ()
    assert "otherData" not in json.loads(trace_of(history))


def test_profile_of_a_host_whose_system_clock_was_set_wrong_is_put_on_ours() -> None:
    """Its monotonic clock is ahead, as it has run for longer, and its system clock behind."""
    ours = RankProfile(start_ns=1000 * S, end_ns=1003 * S, epoch_ns=900 * S)
    theirs = RankProfile(
        start_ns=400 * S,
        end_ns=403 * S,
        epoch_ns=100 * S,
        collectives=(Collective("all_reduce", 401 * S, S),),
        busy=((402 * S, S),),
    )
    profiles = {0: ours, 1: theirs}
    offsets = {0: NEAR, 1: ClockOffset("b", 200.0, 2e-4)}
    clocks = epoch_offsets(profiles, offsets, 900 * S)
    assert clocks == {0: NEAR, 1: ClockOffset("b", -600.0, 2e-4)}
    moved = profile_on_our_clock(theirs, clocks[1])
    assert (moved.start_ns, moved.end_ns) == (1000 * S, 1003 * S)
    assert moved.collectives[0].start_ns == 1001 * S
    assert moved.busy == ((1002 * S, S),)


def test_merged_trace_is_on_one_clock() -> None:
    def trace(at_us: float) -> bytes:
        event = {"ph": "X", "name": "mm", "pid": 7, "tid": 7, "ts": at_us, "dur": 1}
        return json.dumps({"baseTimeNanoseconds": 5 * S, "traceEvents": [event]}).encode()

    traces = {0: trace(10e6), 1: trace(12e6)}
    merged = json.loads(merge_traces(traces, {0: NEAR, 1: ClockOffset("b", 2.0, 1e-4)}))
    begins = {event["pid"]: event["ts"] for event in merged["traceEvents"] if event["ph"] == "X"}
    assert begins == {0: 0, 1: 0}
    assert merged["otherData"]["clocks"]["rank 1"]["offset_s"] == 2.0
