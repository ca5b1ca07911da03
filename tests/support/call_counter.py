"""Counts calls, to see how the work of pure code grows with the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], Any]) -> int:
    """The number of calls of functions, Python's and built-in ones, and of generator steps."""
    num_calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return num_calls


def growth(work: Callable[[int], Callable[[], Any]], n: int) -> float:
    """How many times as many calls `work` makes for 4 n as for n; what it prepares is not counted.

    Linear work gives 4, quadratic work 16.
    """
    return count_calls(work(4 * n)) / count_calls(work(n))
