"""Describes how long ranks took for a cell (``%%dist --time``). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from ...wire.messages import Timing
from ...wire.ranks import format_ranks, group_ranks

# From here on a rank is said to have kept the others waiting: in seconds, and as a part of the
# others' time.
_LATE_S, _LATE_SHARE = 0.005, 0.1


def describe_timings(timings: Mapping[int, Timing]) -> str:
    """Return a line for each group of ranks with equal times, and one that names the straggler.

    Args:
        timings: of each rank.
    """
    alike = group_ranks({rank: _describe(timing) for rank, timing in sorted(timings.items())})
    lines = [f"[{format_ranks(ranks)}] took {text}" for text, ranks in alike.items()]
    late = find_straggler(timings)
    if late is not None:
        others = median(_alone_s(timing) for rank, timing in timings.items() if rank != late)
        own = _seconds(_alone_s(timings[late]))
        lines.append(
            f"rank {late} was the straggler: {own} outside collectives, the others "
            f"{_seconds(others)}"
        )
    return "\n".join(lines)


def find_straggler(timings: Mapping[int, Timing]) -> int | None:
    """Return the rank that took clearly longer than the others outside of collectives; None if
    there is none.

    In a collective all wait for the last, so that all seem to take as long: what tells is the rest.
    """
    if len(timings) < 2:
        return None
    late = max(timings, key=lambda rank: _alone_s(timings[rank]))
    others = median(_alone_s(timing) for rank, timing in timings.items() if rank != late)
    over_s = _alone_s(timings[late]) - others
    return late if over_s > max(_LATE_S, _LATE_SHARE * others) else None


def _alone_s(timing: Timing) -> float:
    return timing.elapsed_s - timing.in_collectives_s


def _describe(timing: Timing) -> str:
    text = _seconds(timing.elapsed_s)
    if timing.in_collectives_s:
        text += f", {_seconds(timing.in_collectives_s)} of it in collectives"
    return text


def _seconds(seconds: float) -> str:
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
