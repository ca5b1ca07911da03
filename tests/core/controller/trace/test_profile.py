"""Profiles: what is read off a profiler's events, and traces joined into one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.trace.chrome import merge_traces
from cellmesh.controller.trace.profile import compare_operators
from cellmesh.wire.trace import Collective, OperatorTime, RankProfile
from cellmesh.workers.trace.torch_profiler import (
    Begun,
    Event,
    add_up,
    alike,
    find_busy,
    find_collectives,
    self_times,
)

GLOO: dict[str, Any] = {"is_async": True, "is_annotation": True}


# ---- on the rank


def test_self_time_leaves_out_what_an_operator_calls() -> None:
    outer, inner, innermost = Event("a", 0, 100), Event("b", 10, 60), Event("c", 20, 30)
    other_thread = Event("d", 5, 25, thread=2)
    region = Event("forward", 0, 100, is_annotation=True)
    times = {
        event.name: ns for event, ns in self_times([outer, region, other_thread, inner, innermost])
    }
    assert times == {"a": 50, "b": 40, "c": 10, "d": 20}


def test_event_outside_any_stack_counts_whole() -> None:
    events = [
        Event("gloo:all_reduce", 0, 50, thread=2, **GLOO),
        Event("gloo:broadcast", 10, 20, thread=2, **GLOO),
        Event("volta_sgemm", 0, 30, on_device=True),
        Event("nccl:all_reduce", 0, 30, on_device=True, is_annotation=True),
    ]
    times = {event.name: ns for event, ns in self_times(events)}
    assert times == {"gloo:all_reduce": 50, "gloo:broadcast": 10, "volta_sgemm": 30}


def test_operators_are_added_up_by_kind_longest_first() -> None:
    events = [
        Event("aten::mm", 0, 10),
        Event("aten::mm", 10, 30),
        Event("aten::add", 30, 35),
        Event("c10d::allreduce_", 40, 41),
        Event("gloo:all_reduce", 40, 90, thread=2, **GLOO),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 0, 7, on_device=True),
        Event("sgemm", 0, 8, on_device=True),
    ]
    assert [(o.name.partition("(")[0], o.kind, o.num_calls, o.self_ns) for o in add_up(events)] == [
        ("gloo:all_reduce", "communication", 1, 50),
        ("aten::mm", "computation", 2, 30),
        ("sgemm", "device", 1, 8),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", 1, 7),
        ("aten::add", "computation", 1, 5),
        ("c10d::allreduce_", "communication", 1, 1),
    ]


def test_gloos_collectives_have_the_groups_that_they_were_begun_on() -> None:
    spans = [("all_reduce", 10, 20), ("all_gather", 12, 25), ("all_reduce", 30, 40)]
    spans += [("all_reduce", 50, 60)]
    events = [Event(f"gloo:{name}", begin, end, **GLOO) for name, begin, end in spans]
    begun = [
        Begun("all_reduce", 9, "tp", (0, 1)),
        Begun("all_gather_into_tensor", 11, "0", ()),
        Begun("reduce_scatter_tensor", 29, "dp", (0, 2)),
    ]
    assert find_collectives(events, begun) == [
        Collective("all_reduce", 10, 10, (0, 1), "tp"),
        Collective("all_gather_into_tensor", 12, 13, (), "0"),
        Collective("reduce_scatter_tensor", 30, 10, (0, 2), "dp"),
        Collective("all_reduce", 50, 10),
    ]


def test_nccls_collectives_are_its_kernels() -> None:
    events = [
        Event("nccl:all_reduce", 0, 2, **GLOO),
        Event("gloo:barrier", 3, 4, **GLOO),
        Event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 5, 9, on_device=True),
    ]
    found = [(one.name, one.start_ns, one.duration_ns) for one in find_collectives(events, [])]
    assert found == [("barrier", 3, 1), ("reduce_scatter", 5, 4)]
    assert [one.name for one in find_collectives(events[:2], [])] == ["all_reduce", "barrier"]


@pytest.mark.parametrize(
    ("called", "below", "same"),
    [
        *(("all_reduce", name, name == "all_reduce") for name in ("all_reduce", "all_gather")),
        *((name, "all_gather", True) for name in ("all_gather_into_tensor", "all_gather_single")),
        ("reduce_scatter_tensor", "all_reduce", True),
        ("all_to_all_single", "all_to_all", True),
        ("all_reduce", "reduce_scatter", False),
    ],
)
def test_a_collective_goes_by_several_names(called: str, below: str, same: bool) -> None:
    assert alike(called, below) is same


def test_busy_is_computation_without_the_communication_in_it() -> None:
    events = [
        Event("backward", 0, 100),
        Event("c10d::allreduce_", 20, 30),
        Event("_c10d_functional::wait_tensor", 60, 90),
        Event("aten::mm", 110, 120),
        Event("sgemm", 80, 85, on_device=True),
        Event("step", 0, 200, is_annotation=True),
    ]
    assert find_busy(events, 0) == ((0, 20), (30, 30), (80, 5), (90, 10), (110, 10))
    assert find_busy(events, 10) == ((0, 60), (80, 40))


_INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12)


@given(computed=_INTERVALS, communicated=_INTERVALS)
def test_busy_is_what_a_clock_would_see(
    computed: list[tuple[int, int]], communicated: list[tuple[int, int]]
) -> None:
    events = [Event("aten::mm", start, start + took) for start, took in computed]
    events += [Event("c10d::send", start, start + took) for start, took in communicated]
    expected = {t for start, took in computed for t in range(start, start + took)}
    expected -= {t for start, took in communicated for t in range(start, start + took)}
    found = find_busy(sorted(events, key=lambda event: event.start_ns), 0)
    assert {t for start, took in found for t in range(start, start + took)} == expected


# ---- traces


def trace_of(base: int, events: list[dict[str, Any]]) -> bytes:
    return json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}).encode()


def spent(name: str, at_us: float, **where: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": at_us, "dur": 2.0, "cat": "cpu_op", **where}


def test_traces_become_one_with_a_process_for_each_rank_on_one_clock() -> None:
    flow = {"ph": "s", "cat": "fwdbwd", "id": 1, "name": "fwdbwd", "ts": 500.2}
    here, there = ({"pid": pid, "tid": pid} for pid in (77, 80))
    name = {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78, "args": {"name": "gloo"}}
    window = {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 600.0}
    first = [
        *(name, window, flow | here, spent("mm", 500.125, **here)),
        spent("gloo:all_reduce", 510.0, pid=77, tid=78),
    ]
    second = [*(flow | there, spent("mm", 200.0, **there)), spent("sgemm", 201.0, pid=0, tid=7)]
    traces = {3: trace_of(10**18 + 400_000, second), 0: trace_of(10**18, first)}
    merged = json.loads(merge_traces(traces))

    def events(name: str) -> list[dict[str, Any]]:
        return [event for event in merged["traceEvents"] if event["name"] == name]

    assert merged["baseTimeNanoseconds"] == 10**18 + 500_125
    names = {event["pid"]: event["args"]["name"] for event in events("process_name")}
    assert names == {0: "rank 0", 3: "rank 3"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events("process_sort_index")}
    assert order == {0: 0, 3: 3}
    assert [(event["pid"], event["ts"]) for event in events("mm")] == [(0, 0.0), (3, 99.875)]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events("thread_name")}
    (gloo,), (kernel,) = events("gloo:all_reduce"), events("sgemm")
    assert threads[0, gloo["tid"]] == "gloo"
    assert kernel["pid"] == 3
    assert sorted(threads.values()) == ["gloo", "main", "main", "thread 7"]
    assert len({event["id"] for event in events("fwdbwd")}) == 2
    assert not events("Record Window End")


def test_one_trace_and_none_can_be_merged() -> None:
    assert json.loads(merge_traces({}))["traceEvents"] == []
    names = {e["name"] for e in json.loads(merge_traces({1: trace_of(0, [])}))["traceEvents"]}
    assert names == {"process_name", "process_sort_index"}


@pytest.mark.parametrize("trace", [b"", b"{}", b"[1]", b'{"traceEvents": 1}'])
def test_invalid_trace_is_refused_with_its_rank(trace: bytes) -> None:
    with pytest.raises(ValueError, match="the trace of rank 2 is none of"):
        merge_traces({2: trace})


def test_operators_are_compared_over_ranks() -> None:
    ours = [[("mm", 2, 2_000)], [("mm", 3, 4_000), ("add", 1, 500)]]
    profiles = {
        rank: RankProfile(
            start_ns=0,
            end_ns=1,
            operators=tuple(OperatorTime(name, "computation", n, ns) for name, n, ns in times),
        )
        for rank, times in enumerate(ours)
    }
    mm, add = compare_operators(profiles)
    assert (mm.name, mm.num_calls, mm.max_rank) == ("mm", 3, 1)
    assert (mm.min_s, mm.mean_s, mm.max_s) == pytest.approx((2e-6, 3e-6, 4e-6))
    assert (add.name, add.min_s, add.max_rank) == ("add", 0.0, 1)
