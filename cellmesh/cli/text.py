"""Formats numbers for people."""

from __future__ import annotations


def format_bytes(number: float) -> str:
    """Format bytes: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Format seconds: ``40 s``, ``5 min``, ``3 h``, ``2 days``; below a second ``30 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``, ``2 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
