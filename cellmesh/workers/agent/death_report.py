"""Explains why a rank's process ended: memory ran out, or it crashed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from ...wire.messages import ENDED_BY_GLOO
from ...wire.segments import format_bytes

# How long after a kill for want of memory the end of another rank by SIGKILL counts as one, too:
# the kernel may have killed both, and takes seconds to free the memory of a large process.
_TOGETHER_S = 10.0
_ADVICE = "use smaller batches, fewer ranks or a host with more memory"
# Messages of C++, Python, torch and libc on a failed allocation.
_REFUSALS = (
    "std::bad_alloc",
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory: you tried to allocate",
)
# gloo's message before it aborts the process.
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


class OomWatch:
    """Detects that the kernel killed a rank because memory ran out.

    The kernel's out-of-memory killer sends SIGKILL, as any process may. The host counts its kills,
    including those for the limits of control groups.
    """

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._vmstat = vmstat
        self._num_kills = self._count()
        self._struck_at = -math.inf

    def has_struck(self, now: float) -> bool:
        """Return whether the kernel's OOM killer has killed a process since the last call, or less
        than a moment before (it may kill several ranks at once); `now`: monotonic time in seconds.
        """
        num_kills = self._count()
        if num_kills > self._num_kills:
            self._num_kills, self._struck_at = num_kills, now
        return now - self._struck_at < _TOGETHER_S

    def _count(self) -> int:
        try:
            lines = self._vmstat.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line[9:]) for line in lines if line.startswith("oom_kill ")), 0)


def explain_kill(held_bytes: int) -> str:
    """Return text for the report of a rank's death: the kernel's OOM killer killed it."""
    return f": out of memory (it held {format_bytes(held_bytes)}; {_ADVICE})"


def explain_refusal(last_output: str, held_bytes: int) -> str:
    """Return text for the report of a rank's death: an allocation of memory failed; "" if the
    rank's last output shows no such failure.
    """
    if not any(refusal in last_output for refusal in _REFUSALS):
        return ""
    return (
        f": it was refused more memory (it held {format_bytes(held_bytes)}; raise `ulimit -v` if "
        f"it limits that, or {_ADVICE})"
    )


def explain_mismatch(last_output: str) -> str:
    """Return text for the report of a rank's death: gloo aborted it, as another rank sent more
    bytes than it expected; "" if the rank's last output does not show this.
    """
    found = _MISMATCH.search(last_output)
    if found is None:
        return ""
    return (
        f": {ENDED_BY_GLOO}, as another rank sent it {int(found[1]):,} bytes where it expected "
        f"{int(found[2]):,}: these ranks have begun operations of different sizes or kinds"
    )


_MAX_LAST_LINES = 10
_FATAL = "Fatal Python error"
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*most recent call first")
_PACKAGE = re.escape(str(Path(__file__).parents[2]))
# A frame of cellmesh, or of Python, below or beside user code.
_OWN_FRAME = re.compile(rf'  File "({_PACKAGE}/.*|<string>|.*/threading\.py)", line \d+ in ')


def without_own_frames(lines: Sequence[str]) -> list[str]:
    """Return a rank's lines of output, with the threads and frames of cellmesh removed from the
    stacks that faulthandler has printed.

    This leaves room for the user's output before the crash; the rank's log keeps the full stacks.
    """
    kept = [line for line in lines if not _OWN_FRAME.match(line)]
    return [
        line
        for line, following in zip(kept, [*kept, ""][1:], strict=True)
        if following.startswith("  File ") or not _HEAD.match(line)
    ]


def last_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines of a dead rank's output that its death report shows.

    Args:
        lines: all lines of output, including faulthandler's stacks.
    """
    kept = without_own_frames(lines)
    # Show the head of a stack: the error and the innermost calls.
    crash = next((at for at, line in enumerate(kept) if line.startswith(_FATAL)), None)
    if crash is not None and len(kept) - crash > _MAX_LAST_LINES:
        return kept[crash : crash + _MAX_LAST_LINES]
    return kept[-_MAX_LAST_LINES:]
