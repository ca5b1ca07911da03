"""Writes traces in Chrome's format: of the last cells' collectives, and torch.profiler's. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from ..core.clocks import ClockOffset
from .history import History, TimelineCell
from .operations import Operation, lanes_of

NO_CLOCKS: Mapping[int, ClockOffset] = MappingProxyType({})
# Rows that torch adds about itself.
_PSEUDO = frozenset({"Spans", "Traces", ""})
# Threads of a rank's process in a history's trace; collectives that overlap have more of the last.
_CELLS, _COMPUTE, _COLLECTIVES = 0, 1, 2


def trace_of(history: History) -> bytes:
    """Return a timeline as a Chrome trace in which each rank is a process; times count from the
    begin of the first cell.

    Returns:
        JSON for ``chrome://tracing`` or Perfetto.
    """
    titles = {cell.run: cell.title for cell in history.cells}
    events: list[dict[str, Any]] = []
    for rank in history.ranks:
        operations = history.operations.get(rank, ())
        lanes = lanes_of(operations)
        events += _name_lanes(rank, max(lanes, default=0) + 1)
        for cell in history.cells:
            events += _of_cell(history, rank, cell)
        for one, lane in zip(operations, lanes, strict=True):
            events += _of_operation(rank, _COLLECTIVES + lane, one, titles[one.run])
    return _encode(events, history.clocks)


def merge_traces(
    traces: Mapping[int, bytes], clocks: Mapping[int, ClockOffset] = NO_CLOCKS
) -> bytes:
    """Merge the traces of torch.profiler to one in which each rank is a process, on one clock.

    torch gives times in microseconds since ``baseTimeNanoseconds``, by the host's system clock.
    Here they count from the first event of any rank.

    Args:
        traces: rank -> the trace that torch.profiler has exported.
        clocks: rank -> the offset of its host's system clock.

    Returns:
        JSON for ``chrome://tracing`` or Perfetto.

    Raises:
        ValueError: a trace is no JSON of that form.
    """
    loaded = {rank: _load(rank, trace) for rank, trace in sorted(traces.items())}
    for rank, clock in clocks.items():
        if rank in loaded:
            base, events = loaded[rank]
            loaded[rank] = base - round(clock.offset_s * 1e9), events
    starts = [
        _nanoseconds(event, base)
        for base, events in loaded.values()
        for event in events
        if event.get("ph") != "M" and "ts" in event
    ]
    origin = min(starts, default=0)
    merged: list[dict[str, Any]] = []
    ids: dict[Any, int] = {}
    for rank, (base, events) in loaded.items():
        merged += _of_rank(rank, events, base, origin, ids)
    return _encode(merged, clocks, baseTimeNanoseconds=origin)


def _load(rank: int, trace: bytes) -> tuple[int, list[dict[str, Any]]]:
    try:
        data = msgspec.json.decode(trace)
        events = [event for event in data["traceEvents"] if event.get("pid") not in _PSEUDO]
        return int(data.get("baseTimeNanoseconds", 0)), events
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the trace of rank {rank} is none of torch.profiler's: {error}"
        ) from error


def _nanoseconds(event: Mapping[str, Any], base: int) -> int:
    return base + round(float(event["ts"]) * 1000)


def _of_rank(
    rank: int, events: Iterable[dict[str, Any]], base: int, origin: int, ids: dict[Any, int]
) -> list[dict[str, Any]]:
    """Return a rank's events for the merged trace: its process and GPU streams become threads of
    one process.
    """
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[int, str] = {}
    made: list[dict[str, Any]] = []
    for event in events:
        place = (event.get("pid"), event.get("tid"))
        if event.get("ph") == "M":
            if event.get("name") == "thread_name" and place[1] is not None:
                thread = threads.setdefault(place, len(threads))
                names.setdefault(
                    thread, _thread_name(place, str(event.get("args", {}).get("name", "")))
                )
            continue
        if "ts" not in event:
            continue
        copy = {**event, "pid": rank, "tid": threads.setdefault(place, len(threads))}
        copy["ts"] = (_nanoseconds(event, base) - origin) / 1000
        if "id" in event:  # flows and async events: an id of one rank is none of another's
            copy["id"] = ids.setdefault((rank, event.get("cat"), event["id"]), len(ids) + 1)
        made.append(copy)
    used = {event["tid"] for event in made}
    header = _name_process(rank)
    for place, thread in threads.items():
        if thread in used:
            name = "main" if place[0] == place[1] else names.get(thread, f"thread {place[1]}")
            header.append(_about(rank, thread, "thread_name", name=name))
            order = -1 if name == "main" else thread
            header.append(_about(rank, thread, "thread_sort_index", sort_index=order))
    return header + made


def _thread_name(place: tuple[Any, Any], name: str) -> str:
    return name or f"thread {place[1]}"


def _about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    """Return a trace event that names or sorts a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _name_process(rank: int) -> list[dict[str, Any]]:
    return [
        _about(rank, 0, "process_name", name=f"rank {rank}"),
        _about(rank, 0, "process_sort_index", sort_index=rank),
    ]


def _encode(
    events: Sequence[dict[str, Any]], clocks: Mapping[int, ClockOffset], **header: Any
) -> bytes:
    if clocks:
        header["otherData"] = {
            "clocks": {
                f"rank {rank}": {
                    "host": clock.host,
                    "offset_s": clock.offset_s,
                    "error_s": clock.error_s,
                }
                for rank, clock in sorted(clocks.items())
            }
        }
    return msgspec.json.encode(
        {"schemaVersion": 1, "displayTimeUnit": "ms", **header, "traceEvents": events}
    )


def _name_lanes(rank: int, num_lanes: int) -> list[dict[str, Any]]:
    names = ["cells", "compute", "collectives", *["collectives, overlapping"] * (num_lanes - 1)]
    return [
        *_name_process(rank),
        *(_about(rank, thread, "thread_name", name=name) for thread, name in enumerate(names)),
        *(
            _about(rank, thread, "thread_sort_index", sort_index=thread)
            for thread in range(len(names))
        ),
    ]


def _of_cell(history: History, rank: int, cell: TimelineCell) -> Iterable[dict[str, Any]]:
    if rank not in cell.by_rank:
        return
    yield _event(rank, _CELLS, cell.title, "cell", *cell.by_rank[rank])
    for begin, end in history.computing(rank, cell):
        yield _event(rank, _COMPUTE, "compute", "compute", begin, end, cell=cell.title)


def _of_operation(rank: int, thread: int, one: Operation, cell: str) -> Iterable[dict[str, Any]]:
    ranks: Sequence[int] | str = list(one.members) or "all"
    yield _event(
        rank,
        thread,
        one.name,
        "message" if one.is_message else "collective",
        one.start_ns,
        one.end_ns,
        cell=cell,
        group=one.group,
        ranks=ranks,
        waited_us=one.waited_ns / 1000,
    )
    if one.waited_ns:
        end_ns = one.start_ns + one.waited_ns
        yield _event(rank, thread, f"waits for rank {one.last}", "wait", one.start_ns, end_ns)


def _event(
    rank: int, thread: int, name: str, category: str, begin_ns: int, end_ns: int, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": thread,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "args": args,
    }
