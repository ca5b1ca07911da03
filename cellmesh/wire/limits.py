"""Limits on runs and bytes in flight (docs/architecture.md lists the queues), and those of this
process's control group and of free memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import UnpicklableError
from .segments import describe_bytes
from .status import RankState

# Runs in flight in one mesh. A controller has 6 kB of each, an agent 1 kB.
MAX_RUNS = 10_000
# Arguments that wait for one rank, behind those of the run that the rank may be executing.
MAX_RUN_BYTES = 256 << 20
# Smaller arguments are not counted: `MAX_RUNS` of them fit.
COUNTED_BYTES = 16 << 10
# A segment counts as this at least, as it takes a descriptor.
SEGMENT_BYTES = 1 << 20
# Before this much is copied, it is asked how much memory is free, which takes a millisecond.
CHECKED_BYTES = 64 << 20
# Answers and widgets' messages that wait in an agent for a controller that is attached and does not
# read.
MAX_ANSWER_BYTES = 256 << 20
# What a rank waits in for so long is not about to end.
_WAIT_S = 2.0


def may_wait_for(state: RankState, ranks: Collection[int]) -> bool:
    """Return whether a rank has waited long in a torch.distributed call in which one of these ranks
    may be missing.

    Where that is so, what these ranks would do next is let through, whatever the bounds say.
    """
    if not state.collective or state.waited_s < _WAIT_S:
        return False
    members = next((count.ranks for count in state.counts if count.name == state.group), ())
    return any(rank in members or not members for rank in ranks)


T = TypeVar("T")

# Version 1 has no word for "no limit": it writes the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True)
class Quota:
    """The tightest limits of this process's control groups; None for no limit.

    Attributes:
        cores: how many cores' time.
        memory_bytes: of memory.
        free_bytes: of that, not in use; files' pages that can be dropped count as free.
        free_tasks: processes and threads still to be had.
    """

    cores: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    free_tasks: int | None = None


def read_quota(root: Path, membership: Path) -> Quota:
    """Read the limits of a process's control group and of those above it, of version 1 or 2.

    Args:
        root: ``/sys/fs/cgroup``.
        membership: ``/proc/self/cgroup``.
    """
    memory = _limits_in(root, membership, "memory", _memory)
    return Quota(
        cores=min(_limits_in(root, membership, "cpu", _cores), default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        free_bytes=min((free for _, free in memory), default=None),
        free_tasks=min(_limits_in(root, membership, "pids", _free_tasks), default=None),
    )


def _limits_in(root: Path, membership: Path, controller: str, read: Callable[[Path], T]) -> list[T]:
    """Return the limits that `read` finds in a control group's directory and in those above it."""
    found = []
    for directory in _directories(root, membership, controller):
        try:
            found.append(read(directory))
        except (OSError, ValueError, IndexError):  # no such file here, or "max"
            continue
    return found


def _directories(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    try:
        lines = os.fsdecode(membership.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be that outside; then only the mount's own top is there to
        # see.
        top = root / controllers if controllers else root
        inner = top / path.lstrip("/")
        while inner != top:
            yield inner
            inner = inner.parent
        yield top


def _cores(directory: Path) -> float:
    if (directory / "cpu.max").exists():
        quota, period = (int(word) for word in (directory / "cpu.max").read_text().split())
    else:
        quota = _number(directory / "cpu.cfs_quota_us")
        period = _number(directory / "cpu.cfs_period_us")
    if quota <= 0 or period <= 0:
        raise ValueError("no limit")
    return quota / period


def _memory(directory: Path) -> tuple[int, int]:
    if (directory / "memory.max").exists():
        limit, used = _number(directory / "memory.max"), _number(directory / "memory.current")
        droppable = "inactive_file"
    else:
        limit = _number(directory / "memory.limit_in_bytes")
        used = _number(directory / "memory.usage_in_bytes")
        droppable = "total_inactive_file"
    if limit >= _NO_LIMIT_BYTES:
        raise ValueError("no limit")
    for line in (directory / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name == droppable:
            used -= int(value)
    return limit, max(0, limit - used)


def _free_tasks(directory: Path) -> int:
    return max(0, _number(directory / "pids.max") - _number(directory / "pids.current"))


def _number(path: Path) -> int:
    return int(path.read_text())


def free_bytes() -> int:
    """Return the number of bytes that this process may still allocate."""
    import psutil  # 10 ms, for what happens before a large value is sent

    quota = read_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    free: int = psutil.virtual_memory().available
    return free if quota.free_bytes is None else min(free, quota.free_bytes)


def check_fits(num_bytes: int) -> None:
    """Raise an error unless a copy with so many bytes fits into free memory.

    Raises:
        UnpicklableError: it does not.
    """
    free = free_bytes()
    if num_bytes > free:
        raise UnpicklableError(
            f"a value of {describe_bytes(num_bytes)} does not fit: {describe_bytes(free)} of "
            "memory are free, and it is copied to be sent. Nothing has been sent: send it in "
            "parts, or have each rank read its own from a file"
        )
