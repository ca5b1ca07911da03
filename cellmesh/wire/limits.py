"""Bounds on runs and bytes in flight (docs/architecture.md lists the queues), and the free memory,
also within the limits of this process's control group (cgroup).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import UnpicklableError
from .segments import format_bytes
from .status import RankState

# Runs in flight in one mesh. Each takes 6 kB in a controller, 1 kB in an agent.
MAX_RUNS = 10_000
# Arguments that wait for one rank, behind those of the run that the rank may be executing.
MAX_RUN_BYTES = 256 << 20
# Smaller arguments are not counted: `MAX_RUNS` of them fit.
COUNTED_BYTES = 16 << 10
# Least size that a segment counts as, since it takes a descriptor.
SEGMENT_BYTES = 1 << 20
# Free memory is checked before a copy of at least this size: the check takes half a millisecond.
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


# Version 1 expresses "no limit" by the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 62


def free_in_group(root: Path, membership: Path) -> int | None:
    """Return the bytes of memory that the limits of this process's control group (cgroup, version 1
    or 2) and its parents leave; None without a limit.

    Pages of files that can be dropped count as free.

    Args:
        root: ``/sys/fs/cgroup``.
        membership: ``/proc/self/cgroup``.
    """
    found = []
    for directory in _directories(root, membership):
        try:
            found.append(_free_in(directory))
        except (OSError, ValueError, IndexError):  # no such file here, or "max"
            continue
    return min(found, default=None)


def _directories(root: Path, membership: Path) -> Iterator[Path]:
    try:
        lines = os.fsdecode(membership.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # In a container the path may be the one outside of it; then only the mount's root exists.
        top = root / controllers if controllers else root
        inner = top / path.lstrip("/")
        while inner != top:
            yield inner
            inner = inner.parent
        yield top


def _free_in(directory: Path) -> int:
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
    return max(0, limit - used)


def _number(path: Path) -> int:
    return int(path.read_text())


def free_bytes() -> int:
    """Return the number of bytes that this process may still allocate."""
    free = free_in_group(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    lines = Path("/proc/meminfo").read_text().splitlines()  # importing psutil takes 10 ms a rank
    available = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    return available if free is None else min(available, free)


def check_fits(num_bytes: int) -> None:
    """Raise an error unless a copy of this size, in bytes, fits into free memory.

    Raises:
        UnpicklableError: the copy does not fit.
    """
    free = free_bytes()
    if num_bytes > free:
        raise UnpicklableError(
            f"a value of {format_bytes(num_bytes)} does not fit: {format_bytes(free)} of "
            "memory are free, and it is copied to be sent. Nothing has been sent: send it in "
            "parts, or have each rank read its own from a file"
        )
