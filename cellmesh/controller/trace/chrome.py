"""Chrome traces: of the last cells' collectives, and merged from torch.profiler. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..core.clocks import ClockOffset
from .history import NO_CLOCKS, History
from .operations import Operation

# Rows that torch adds about itself.
_PSEUDO = ("Spans", "Traces", "")


def trace_of(history: History) -> bytes:
    """Return a timeline as a Chrome trace in which each rank is a process; times count from the
    start of the first cell.

    Returns:
        JSON for ``chrome://tracing`` or Perfetto.
    """
    titles = {cell.run: cell.title for cell in history.cells}
    events: list[dict[str, Any]] = []
    for rank in history.ranks:
        events += _name(rank)
        for cell in history.cells:
            if rank in cell.by_rank:
                events += _span(rank, cell.title, "cell", *cell.by_rank[rank])
                for begin_ns, end_ns in history.computing(rank, cell):
                    events += _span(rank, "compute", "compute", begin_ns, end_ns, cell=cell.title)
        for one in history.operations.get(rank, ()):
            events += _of_operation(rank, one, titles[one.run])
    return _encode(events)


def _of_operation(rank: int, one: Operation, cell: str) -> Iterator[dict[str, Any]]:
    yield from _span(
        rank,
        one.name,
        "message" if one.is_message else "collective",
        one.start_ns,
        one.end_ns,
        cell=cell,
        group=one.group,
        ranks=list(one.members) or "all",
        waited_us=one.waited_ns / 1000,
    )
    if one.waited_ns:
        waited_ns = one.start_ns + one.waited_ns
        yield from _span(rank, f"waits for rank {one.last}", "wait", one.start_ns, waited_ns)


_ids = itertools.count(1)


def _span(
    rank: int, name: str, category: str, begin_ns: int, end_ns: int, **args: Any
) -> Iterator[dict[str, Any]]:
    """Yield two events, the begin and the end of an operation, in Chrome's asynchronous type: the
    viewer draws overlapping events of this type in separate rows.
    """
    event = {"name": name, "cat": category, "pid": rank, "tid": 0, "id": next(_ids)}
    yield {**event, "ph": "b", "ts": begin_ns / 1000, "args": args}
    yield {**event, "ph": "e", "ts": end_ns / 1000}


def merge_traces(
    traces: Mapping[int, bytes],
    clocks: Mapping[int, ClockOffset] = NO_CLOCKS,
    epochs_ns: Mapping[int, int] | None = None,
) -> bytes:
    """Merge the ranks' traces of torch.profiler into one with a common clock and a process per
    rank.

    torch gives times in microseconds since ``baseTimeNanoseconds``, by the host's system clock.
    Here they count from the first event of any rank.

    Args:
        traces: rank -> the trace that torch.profiler has exported, as JSON.
        clocks: rank -> the offset of its host's monotonic clock.
        epochs_ns: rank -> the lead of its host's system clock over the monotonic one, in
            nanoseconds.

    Returns:
        JSON for ``chrome://tracing`` or Perfetto.

    Raises:
        ValueError: a trace is not JSON as torch.profiler exports it.
    """
    merged: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        ahead_ns = (epochs_ns or {}).get(rank, 0)
        ahead_ns += round(clocks[rank].offset_s * 1e9) if rank in clocks else 0
        try:
            merged += [*_name(rank), *_of_rank(rank, msgspec.json.decode(trace), ahead_ns)]
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the trace of rank {rank} is none of torch.profiler's: {error}"
            ) from error
    timed = [event for event in merged if event["ph"] != "M"]
    origin_ns = min((event["ts"] for event in timed), default=0)
    for event in timed:
        event["ts"] = (event["ts"] - origin_ns) / 1000
    return _encode(merged)


def _of_rank(rank: int, data: Any, ahead_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a rank's events in nanoseconds, with the threads of its process and the streams of its
    GPU as threads of one process, under the names that torch gave them.
    """
    base_ns = int(data.get("baseTimeNanoseconds", 0)) - ahead_ns
    for event in data["traceEvents"]:
        if event.get("pid") in _PSEUDO:
            continue
        if event.get("ph") == "M":
            if str(event.get("name")).startswith("thread_"):
                yield {**event, "pid": rank, "ts": 0}
        elif "ts" in event:
            moved = {**event, "pid": rank, "ts": base_ns + round(float(event["ts"]) * 1000)}
            if "id" in event:  # ids of flows and async events are unique within a rank only
                moved["id"] = f"{rank}.{event['id']}"
            yield moved


def _name(rank: int) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that set the name and the position of a rank's process."""
    for name, args in (
        ("process_name", {"name": f"rank {rank}"}),
        ("process_sort_index", {"sort_index": rank}),
    ):
        yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "ts": 0, "args": args}


def _encode(events: Sequence[dict[str, Any]]) -> bytes:
    return msgspec.json.encode({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events})
