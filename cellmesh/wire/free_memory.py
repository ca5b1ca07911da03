"""Checks free memory before a large value is copied, as the kernel kills a process when memory runs
out.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import UnpicklableError
from .cgroups import read_quota
from .segments import describe_bytes


def free_bytes() -> int:
    """Bytes that this process may still allocate."""
    import psutil  # 10 ms, for what happens before a large value is sent

    quota = read_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    free: int = psutil.virtual_memory().available
    return free if quota.free_bytes is None else min(free, quota.free_bytes)


def check_fits(num_bytes: int) -> None:
    """Check that a copy with so many bytes fits into memory.

    Raises:
        UnpicklableError: it does not.
    """
    free = free_bytes()
    if num_bytes > free:
        raise UnpicklableError(
            f"a value of {describe_bytes(num_bytes)} does not fit: {describe_bytes(free)} of "
            "memory are free, and it is copied to be sent. Nothing has been sent: send it in "
            "parts, or have each rank read its own (`cellmesh.from_file`)"
        )
