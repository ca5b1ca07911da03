"""What a check finds, and words that checks share."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Status = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """What one check found.

    Attributes:
        title: what was looked at.
        status: ``problem``: meshes will not start or not work; ``warning``: something will not, or
            slowly.
        text: what there is, and what it means.
        remedy: what to type or to change; "" where all is well.
    """

    title: str
    status: Status
    text: str
    remedy: str = ""


def ok(title: str, text: str) -> Finding:
    """All is well."""
    return Finding(title, "ok", text)


def warning(title: str, text: str, remedy: str) -> Finding:
    """Meshes run, but something will not work or be slow."""
    return Finding(title, "warning", text, remedy)


def problem(title: str, text: str, remedy: str) -> Finding:
    """Meshes will not start, or not work."""
    return Finding(title, "problem", text, remedy)


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def format_version(version: tuple[int, ...]) -> str:
    """``(2, 11)`` as ``2.11``."""
    return ".".join(map(str, version))


def format_bytes(number: float) -> str:
    """``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def format_seconds(seconds: float) -> str:
    """``40 s``, ``5 min``, ``3 h``, ``2 days``; below a second ``30 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
