"""Spans of time as users write them: ``30m``, or a number of seconds."""

from __future__ import annotations

import re
from typing import Any

from ..errors import MeshUsageError

_MAX_SPAN_S = 365 * 86400.0


def parse_duration(text: str) -> float:
    """Read a duration such as ``30m``, ``2h`` or ``0``.

    Args:
        text: ``30m``, ``1.5h``, ``90s`` or a number of seconds.

    Returns:
        Seconds.

    Raises:
        MeshUsageError: it is not of that form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|d)?", text.strip())
    if not found:
        raise MeshUsageError(f"{text!r} is no span of time: write it like 30m, 2h or 90 (seconds)")
    unit_s = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    return float(found[1]) * unit_s[found[2] or "s"]


def check_duration(option: str, value: Any) -> float:
    """Return an option's span of time in seconds.

    Args:
        option: its name, for the error.
        value: seconds, or text as `parse_duration` reads it.

    Raises:
        MeshUsageError: it is neither, is negative, or is longer than a year.
    """
    seconds = parse_duration(value) if isinstance(value, str) else value
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds <= _MAX_SPAN_S
    ):
        raise MeshUsageError(
            f"{option} must be a span of time, in seconds or like 30m, at most a year, and not "
            f"{value!r}"
        )
    return float(seconds)
