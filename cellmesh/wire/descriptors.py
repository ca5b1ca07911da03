"""Waits for file descriptors of any number, and raises the limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import select
from collections.abc import Iterable

# Descriptors that a process needs for one more host: the pipes of its command, its connections, and
# the connections that are tried out during its start.
FILES_A_HOST = 16


def wait_readable(descriptors: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Wait until a descriptor is readable or has hung up; return all such descriptors.

    Uses ``poll(2)``, as ``select(2)`` takes no descriptor from 1,024 on.

    Args:
        descriptors: file descriptors to wait for.
        timeout_s: time limit, in seconds; None for no limit.
    """
    poll = select.poll()
    for number in descriptors:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def make_room(num_more: int) -> int:
    """Raise the soft limit of open files, at most to the hard one, so that `num_more` can be
    opened.

    No further than that: some programs visit each number below the soft limit, which they inherit.

    Args:
        num_more: number of files to be opened besides the open ones.

    Returns:
        The previous soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    needed = len(os.listdir("/proc/self/fd")) + num_more
    if soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def limit_child(pid: int, soft: int) -> None:
    """Set a new process's soft limit of open files to the one that `make_room` has returned."""
    with contextlib.suppress(OSError):  # it has ended
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
