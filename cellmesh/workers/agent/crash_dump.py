"""Shortens the stacks that faulthandler writes when a rank crashes to the user's part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2])
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*most recent call first")
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line \d+ in ')


def without_own_frames(lines: Sequence[str], package: str = _PACKAGE) -> list[str]:
    """Leave out the threads of the runtime, and the frames that a cell or a call is executed by.

    Args:
        lines: what a rank wrote last; its output shows the same in full.
        package: the folder whose frames are the runtime's.

    Returns:
        The lines, with what the user wrote before the crash among the last ones.
    """
    kept: list[str] = []
    at = 0
    while at < len(lines):
        end = at + 1
        if head := _HEAD.match(lines[at]):
            while end < len(lines) and _FRAME.match(lines[end]):
                end += 1
            num_users = _num_users(lines[at + 1 : end], package)
            if num_users or head[1] == "Current thread":
                kept += lines[at : at + 1 + num_users] if num_users else lines[at:end]
        else:
            kept.append(lines[at])
        at = end
    return kept


def _num_users(frames: Sequence[str], package: str) -> int:
    """Number of frames, from the innermost up to the outermost one of user code."""
    num = len(frames)
    while num and _is_runtimes(frames[num - 1], package):
        num -= 1
    return num


def _is_runtimes(frame: str, package: str) -> bool:
    match = _FRAME.match(frame)
    file = match["file"] if match else ""
    return file.startswith(f"{package}/") or file == "<string>" or file.endswith("/threading.py")
