"""Profiles: what is read off a profiler's events, and traces joined into one."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from cellmesh.controller.core.clocks import ClockOffset
from cellmesh.controller.trace.chrome import merge_traces
from cellmesh.wire.trace import RECORD, CellSpan, Past, What
from cellmesh.workers.trace.torch_profiler import Event, add_up, at_kernels, find_busy, self_times

S = 10**9
GLOO: dict[str, Any] = {"is_async": True, "is_annotation": True}


# ---- on the rank


def test_self_time_leaves_out_what_an_operator_calls() -> None:
    outer, inner, innermost = Event("a", 0, 100), Event("b", 10, 60), Event("c", 20, 30)
    other_thread = Event("d", 5, 25, thread=2)
    region = Event("forward", 0, 100, is_annotation=True)
    kernel = Event("sgemm", 0, 30, on_device=True)  # in no stack, and counts whole
    events = [outer, region, other_thread, inner, innermost, kernel]
    times = {event.name: ns for event, ns in self_times(events)}
    assert times == {"a": 50, "b": 40, "c": 10, "d": 20, "sgemm": 30}


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


EPOCH_NS = 10**18


def kernel(name: str, start_s: float, end_s: float) -> Event:
    start_ns, end_ns = (EPOCH_NS + round(at * 1e9) for at in (start_s, end_s))
    return Event(name, start_ns, end_ns, on_device=True)


def past_of(*operations: tuple[What, float, float]) -> Past:
    """A record of operations: what, begin and end."""
    whats = tuple(dict.fromkeys(what for what, *_ in operations))
    return Past(
        (CellSpan(1, "", 1, 0, 9),),
        whats,
        array("i", [whats.index(what) for what, *_ in operations]),
        b"".join(RECORD.pack(7, -1, 1, begin, end, begin) for _, begin, end in operations),
        0,
        9,
    )


def read(past: Past) -> list[tuple[str, bool, float, float, bool]]:
    rows = zip(past.what, RECORD.iter_unpack(past.numbers), strict=True)
    found = ((past.whats[which], *row[3:]) for which, row in rows)
    return [(w.name, w.is_launch, begin, end, wait != wait) for w, begin, end, wait in found]


def test_operations_on_a_gpu_are_where_their_kernels_ran() -> None:
    names = ("all_reduce", "all_gather_into_tensor", "barrier", "send", "broadcast")
    reduce, gather, barrier, send, lost = (What(name, "0", (), 0, is_launch=True) for name in names)
    gloo = What("all_reduce", "1", (), 0)
    events = [
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 0.5, 0.75),  # before any was launched
        kernel("ncclKernel_AllGather_RING_LL", 2, 3),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 3, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 5, 6),
        Event("nccl:all_reduce", EPOCH_NS, EPOCH_NS + 1, on_device=True, is_annotation=True),
        kernel("ncclDevKernel_SendRecv(x)", 7, 8),
    ]
    launched = [(reduce, 1, 1.25), (gather, 1.5, 1.75), (gloo, 2, 2.5)]
    launched += [(barrier, 2.75, 3), (send, 4, 5)]
    past = at_kernels(past_of(*launched, (lost, 5, 6)), events, EPOCH_NS)
    assert read(past) == [
        ("all_reduce", False, 3, 4, True),
        ("all_gather_into_tensor", False, 2, 3, True),
        ("all_reduce", False, 2, 2.5, False),
        ("barrier", False, 5, 6, True),
        ("send", False, 7, 8, True),
        ("broadcast", True, 5, 6, False),
    ]


def test_a_gpu_is_busy_while_it_computes() -> None:
    events = [
        Event("aten::mm", EPOCH_NS, EPOCH_NS + 9),
        kernel("sgemm", 1, 2),
        kernel("Memcpy DtoH", 1.5, 3),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 4, 5),
        kernel("sgemm", 6, 7),
    ]
    assert find_busy(events, EPOCH_NS) == ((1, 3), (6, 7))
    assert find_busy(events[:1], EPOCH_NS) == ()


# ---- traces


def trace_of(base: int, events: list[dict[str, Any]]) -> bytes:
    return json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}).encode()


def spent(name: str, at_us: float, **where: int) -> dict[str, Any]:
    usual = {"ph": "X", "dur": 2.0, "cat": "cpu_op", "pid": 7, "tid": 7}
    return {**usual, "name": name, "ts": at_us, **where}


def test_traces_become_one_with_a_process_for_each_rank_on_one_clock() -> None:
    flow = {"ph": "s", "cat": "fwdbwd", "id": 1, "name": "fwdbwd", "ts": 500.2}
    here, there = ({"pid": pid, "tid": pid} for pid in (77, 80))
    name = {"ph": "M", "name": "thread_name", "ts": 7e9, "args": {"name": "gloo"}}
    window = {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 600.0}
    first = [
        *(name | {"pid": 77, "tid": 78}, window, flow | here, spent("mm", 500.125, **here)),
        spent("gloo:all_reduce", 510.0, pid=77, tid=78),
    ]
    second = [*(flow | there, spent("mm", 200.0, **there)), spent("sgemm", 201.0, pid=0, tid=7)]
    traces = {3: trace_of(10**18 + 400_000, second), 0: trace_of(10**18, first)}
    merged = json.loads(merge_traces(traces))

    def events(name: str) -> list[dict[str, Any]]:
        return [event for event in merged["traceEvents"] if event["name"] == name]

    names = {event["pid"]: event["args"]["name"] for event in events("process_name")}
    assert names == {0: "rank 0", 3: "rank 3"}
    assert [(event["pid"], event["ts"]) for event in events("mm")] == [(0, 0.0), (3, 99.875)]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events("thread_name")}
    (gloo,), (kernel,) = events("gloo:all_reduce"), events("sgemm")
    assert threads == {(0, gloo["tid"]): "gloo"}
    assert kernel["pid"] == 3
    assert len({event["id"] for event in events("fwdbwd")}) == 2
    assert not events("Record Window End")
    assert max(event["ts"] for event in merged["traceEvents"]) < 1000


def test_merged_trace_is_on_one_clock() -> None:
    """The other host's monotonic clock is 200 s ahead, and its system clock was set wrong: 800 s
    behind ours.
    """
    traces = {r: trace_of(5 * S, [spent("mm", at)]) for r, at in enumerate((1000e6, 402e6))}
    clocks = {0: ClockOffset("a", 0.0, 1e-4), 1: ClockOffset("b", 200.0, 1e-4)}
    merged = json.loads(merge_traces(traces, clocks, {0: 900 * S, 1: 100 * S}))
    begins = {event["pid"]: event["ts"] for event in merged["traceEvents"] if event["ph"] == "X"}
    assert begins == {0: 0, 1: 2e6}


@pytest.mark.parametrize("trace", [b"", b"{}", b"[1]", b'{"traceEvents": 1}'])
def test_invalid_trace_is_refused_with_its_rank(trace: bytes) -> None:
    with pytest.raises(ValueError, match="the trace of rank 2 is none of"):
        merge_traces({2: trace})
