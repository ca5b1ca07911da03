"""Losses of two ways to run a program, compared bit for bit."""

from __future__ import annotations

from itertools import zip_longest

# Rank -> its losses, a step each.
Losses = dict[int, list[float]]


def difference(name: str, ours: Losses, other_name: str, theirs: Losses) -> str:
    """Return where two runs, of these names, part first; "" if they agree bit for bit."""
    if ours.keys() != theirs.keys():
        return f"{name} has ranks {sorted(ours)}, {other_name} {sorted(theirs)}"
    found = [
        (step, rank, a, b)
        for rank in ours
        for step, (a, b) in enumerate(zip_longest(ours[rank], theirs[rank]))
        if a is None or b is None or a.hex() != b.hex()
    ]
    if not found:
        return ""
    step, rank, a, b = min(found, key=lambda each: each[:2])
    return f"step {step} on rank {rank}: {a!r} {name}, {b!r} {other_name}"
