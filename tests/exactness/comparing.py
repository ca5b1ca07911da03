"""Losses of two ways to run a program, compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

# Rank -> its losses, a step each.
Losses = dict[int, list[float]]


def difference(name: str, ours: Losses, other_name: str, theirs: Losses) -> str:
    """Where two runs part, in words; "" if they agree bit for bit.

    Args:
        name, other_name: what to call them.
        ours, theirs: what they computed.
    """
    if ours.keys() != theirs.keys():
        return f"{name} has ranks {sorted(ours)}, {other_name} {sorted(theirs)}"
    found = [
        (step, rank)
        for rank in ours
        if (step := _first_difference(ours[rank], theirs[rank])) is not None
    ]
    if not found:
        return ""
    step, rank = min(found)
    if step >= min(len(ours[rank]), len(theirs[rank])):
        return (
            f"rank {rank} took {len(ours[rank])} steps {name} and {len(theirs[rank])} {other_name}"
        )
    a, b = ours[rank][step], theirs[rank][step]
    most = max(abs(x - y) for each in ours for x, y in zip(ours[each], theirs[each], strict=False))
    return (
        f"step {step} on rank {rank}: {a!r} ({a.hex()}) {name}, {b!r} ({b.hex()}) {other_name}: a "
        f"difference of {abs(a - b):.3g}; on {len(found)} of {len(ours)} ranks, by at most "
        f"{most:.3g} at any step"
    )


def _first_difference(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.hex() != b.hex():
            return step
    return min(len(ours), len(theirs)) if len(ours) != len(theirs) else None
