"""Joins the ranks' traces into one, in Chrome's format. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

# Rows that torch adds about itself.
_PSEUDO = frozenset({"Spans", "Traces", ""})


def merge_traces(traces: Mapping[int, bytes]) -> bytes:
    """One trace in which each rank is a process, all on one clock.

    torch gives times in microseconds since ``baseTimeNanoseconds``, by the host's system clock.
    Here they count from the first event of any rank.

    Args:
        traces: rank -> the trace that torch.profiler has exported.

    Returns:
        JSON for ``chrome://tracing`` or Perfetto.

    Raises:
        ValueError: a trace is no JSON of that form.
    """
    loaded = {rank: _load(rank, trace) for rank, trace in sorted(traces.items())}
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
    header = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin}
    return msgspec.json.encode({**header, "traceEvents": merged})


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
    """The events of one rank: its process and its GPU's streams become threads of one process."""
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
    header = [about(rank, 0, "process_name", name=f"rank {rank}")]
    header.append(about(rank, 0, "process_sort_index", sort_index=rank))
    for place, thread in threads.items():
        if thread in used:
            name = "main" if place[0] == place[1] else names.get(thread, f"thread {place[1]}")
            header.append(about(rank, thread, "thread_name", name=name))
            order = -1 if name == "main" else thread
            header.append(about(rank, thread, "thread_sort_index", sort_index=order))
    return header + made


def _thread_name(place: tuple[Any, Any], name: str) -> str:
    return name or f"thread {place[1]}"


def about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    """An event that names a process or a thread, or says where it stands."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
