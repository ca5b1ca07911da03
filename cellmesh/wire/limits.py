"""Bounds on runs and bytes in flight (docs/architecture.md lists the queues), and the limits of
this process's control group and free memory.
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

# Runs in flight in one mesh. Each takes 6 kB in a controller, 1 kB in an agent.
MAX_RUNS = 10_000
# Arguments that wait for one rank, behind those of the run that the rank may be executing.
MAX_RUN_BYTES = 256 << 20
# Smaller arguments are not counted: `MAX_RUNS` of them fit.
COUNTED_BYTES = 16 << 10
# Least size that a segment counts as, since it takes a descriptor.
SEGMENT_BYTES = 1 << 20
# Free memory is checked before a copy of at least this size: the check takes a millisecond.
CHECKED_BYTES = 64 << 20
# Answers and widgets' messages that wait in an agent for an attached controller that does not read.
MAX_ANSWER_BYTES = 256 << 20
# A collective in which a rank has waited for so long is unlikely to end soon.
_WAIT_S = 2.0


def may_wait_for(state: RankState, ranks: Collection[int]) -> bool:
    """Return whether a rank has waited long in a torch.distributed call that one of these ranks may
    still have to join.

    If so, the next run of these ranks is sent regardless of the bounds.
    """
    if not state.collective or state.waited_s < _WAIT_S:
        return False
    members = next((count.ranks for count in state.counts if count.name == state.group), ())
    return any(rank in members or not members for rank in ranks)


T = TypeVar("T")

# Version 1 expresses "no limit" by the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True)
class Quota:
    """The tightest limits of this process's control groups; None for no limit.

    Attributes:
        cores: number of cores whose CPU time the process may use.
        memory_bytes: limit of memory, in bytes.
        free_bytes: unused part of it, in bytes; pages of files that can be dropped count as unused.
        free_tasks: number of further processes and threads.
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
        # In a container the path may be the one outside of it; then only the mount's root exists.
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
    import psutil  # takes 10 ms, and only large values need it

    quota = read_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    free: int = psutil.virtual_memory().available
    return free if quota.free_bytes is None else min(free, quota.free_bytes)


def check_fits(num_bytes: int) -> None:
    """Raise an error unless a copy of this size, in bytes, fits into free memory.

    Raises:
        UnpicklableError: the copy does not fit.
    """
    free = free_bytes()
    if num_bytes > free:
        raise UnpicklableError(
            f"a value of {describe_bytes(num_bytes)} does not fit: {describe_bytes(free)} of "
            "memory are free, and it is copied to be sent. Nothing has been sent: send it in "
            "parts, or have each rank read its own from a file"
        )
