"""Explains why a rank's process ended: memory ran out, or it crashed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...wire.messages import ENDED_BY_GLOO

# cgroup version 1 has no value for "no limit": it shows the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 62
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


@dataclass(frozen=True)
class Group:
    """A Linux control group: its memory limit, and how many processes the kernel killed in it."""

    directory: Path
    num_kills: int
    limit_bytes: int | None


class OomWatch:
    """Detects that the kernel killed a rank because memory ran out.

    The kernel's out-of-memory killer sends SIGKILL, as any process may; it counts its kills for
    each control group (version 1 and 2) and for the host.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._root = root
        self._proc = proc
        self._directories: dict[int, Path] = {}
        self._counts: dict[Path, int] = {}
        self._host_kills = self._count_host_kills()

    def watch(self, pid: int) -> None:
        """Note the control group of a new rank's process, as it cannot be read after its end."""
        group = self._find_group(pid)
        if group is not None:
            self._directories[pid] = group.directory
            self._counts.setdefault(group.directory, group.num_kills)

    def was_killed(self, pid: int) -> tuple[bool, int | None]:
        """Return whether the kernel's out-of-memory killer has struck in a process's control group
        since the last call, and the group's limit in bytes.

        Args:
            pid: a process ended by SIGKILL and not reaped yet; call once for each.
        """
        noted = self._directories.pop(pid, None)
        found = [self._find_group(pid), _read_group(noted) if noted is not None else None]
        # The process may have been moved to another group since `watch`.
        groups = {group.directory: group for group in found if group is not None}
        host_kills, before = self._count_host_kills(), self._host_kills
        self._host_kills = host_kills
        limit_bytes, rose = None, False
        for group in groups.values():
            limit_bytes = limit_bytes or group.limit_bytes
            counted = self._counts.get(group.directory, 0)
            # Count one kill only: others may be of ranks whose end is reported later.
            if group.num_kills > counted:
                rose, self._counts[group.directory] = True, counted + 1
        return rose or host_kills > before, limit_bytes

    def _count_host_kills(self) -> int:
        try:
            return parse_count((self._proc / "vmstat").read_text())
        except OSError:
            return 0

    def _find_group(self, pid: int) -> Group | None:
        try:
            membership = os.fsdecode((self._proc / str(pid) / "cgroup").read_bytes())
        except OSError:
            return None
        for directory in _candidates(self._root, membership):
            group = _read_group(directory)
            if group is not None:
                return group
        return None


def parse_count(text: str) -> int:
    """Return ``oom_kill`` from ``/proc/vmstat`` or a control group's file; 0 if it is missing."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdecimal():
            return int(number)
    return 0


def parse_address_limit(limits: str) -> int | None:
    """Return RLIMIT_AS from the text of ``/proc/PID/limits``, in bytes; None if unlimited."""
    for line in limits.splitlines():
        if line.startswith("Max address space"):
            soft = line.split()[3]
            return int(soft) if soft.isdecimal() else None
    return None


def explain_kill(held_bytes: int, limit_bytes: int | None) -> str:
    """Return an explanation, for the report of a rank's death, that the kernel's OOM killer ended
    it.
    """
    held = f"it held {_format(held_bytes)}"
    if limit_bytes is not None:
        held += f", and its control group may use {_format(limit_bytes)}"
    return f": out of memory ({held}; {_ADVICE})"


def explain_refusal(last_output: str, held_bytes: int, address_limit_bytes: int | None) -> str:
    """Return an explanation of a rank's death after a failed allocation; "" for other causes."""
    if not any(refusal in last_output for refusal in _REFUSALS):
        return ""
    if address_limit_bytes is None:
        return f": it was refused more memory (it held {_format(held_bytes)}; {_ADVICE})"
    return (
        f": it was refused more memory (it held {_format(held_bytes)}; the limit on its address "
        f"space, `ulimit -v`, is {_format(address_limit_bytes)}: raise that, or {_ADVICE})"
    )


def explain_mismatch(last_output: str) -> str:
    """Return an explanation of a rank's death by gloo's SIGABRT, raised because another rank sent
    more bytes than this one expected; "" for other causes.
    """
    found = _MISMATCH.search(last_output)
    if found is None:
        return ""
    return (
        f": {ENDED_BY_GLOO}, as another rank sent it {int(found[1]):,} bytes where it expected "
        f"{int(found[2]):,}: these ranks have begun operations of different sizes or kinds"
    )


def _format(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _candidates(root: Path, membership: str) -> Iterator[Path]:
    """Yield possible directories of a process's control group; a container has only the top one."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        inner = path.removesuffix(" (deleted)").lstrip("/")
        if "memory" in controllers.split(","):
            yield from (root / controllers / inner, root / "memory" / inner, root / "memory")
        elif not controllers:
            yield from (root / inner, root / "unified" / inner, root)


def _read_group(directory: Path) -> Group | None:
    try:
        if (directory / "memory.events").exists():
            text = (directory / "memory.events").read_text()
            limit = (directory / "memory.max").read_text().strip()
        else:
            text = (directory / "memory.oom_control").read_text()
            limit = (directory / "memory.limit_in_bytes").read_text().strip()
    except OSError:
        return None
    limit_bytes = int(limit) if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES else None
    return Group(directory, parse_count(text), limit_bytes)


_MAX_LAST_LINES = 10
_FATAL = "Fatal Python error"
_PACKAGE = str(Path(__file__).parents[2])
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*most recent call first")
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line \d+ in ')


def without_own_frames(lines: Sequence[str], package: str = _PACKAGE) -> list[str]:
    """Return lines of output without the threads and frames of cellmesh in faulthandler's stacks.

    This leaves room for the user's output before the crash; the rank's log keeps the full stacks.
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


def _num_users(frames: Sequence[str], package: str) -> int:
    """Return the number of frames from the innermost up to the outermost frame of user code."""
    num = len(frames)
    while num and _is_runtimes(frames[num - 1], package):
        num -= 1
    return num


def _is_runtimes(frame: str, package: str) -> bool:
    match = _FRAME.match(frame)
    file = match["file"] if match else ""
    return file.startswith(f"{package}/") or file == "<string>" or file.endswith("/threading.py")
