"""Counts steps of Python, to see how the work of pure code grows with the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_steps(work: Callable[[], Any]) -> int:
    """The number of bytecode instructions, those of comprehensions and generators included.

    A call of built-in code is one, whatever it does.
    """
    num_steps = 0

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_steps += event == "opcode"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_steps


def growth(work: Callable[[int], Callable[[], Any]], n: int) -> float:
    """How many times as many steps `work` makes for 4 n as for n; what it prepares is not counted.

    Linear work gives 4, quadratic work 16.
    """
    work(n)()  # imports and caches are filled
    return count_steps(work(4 * n)) / count_steps(work(n))
