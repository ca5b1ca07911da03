"""Waits for descriptors, however large their numbers, and makes room for more of them."""

from __future__ import annotations

import contextlib
import os
import resource
import select
from collections.abc import Iterable

# What one more host takes of a process: the pipes of its command, its connections, and those that
# are tried out while it starts.
FILES_A_HOST = 16


def wait_readable(descriptors: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Wait until a descriptor can be read or has hung up; return those that can.

    Not by ``select(2)``, which takes no descriptor from 1,024 on.

    Args:
        descriptors: to wait for.
        timeout_s: how long; None for as long as it takes.
    """
    poll = select.poll()
    for number in descriptors:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def make_room(num_more: int) -> int:
    """Raise the soft limit of open files, as far as the hard one goes, so that so many more may be
    opened.

    No further than that: there are programs that look at each number below the soft limit, which
    they inherit.

    Args:
        num_more: how many.

    Returns:
        The soft limit before.
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
    """Give a process that was just started the soft limit of open files that `make_room` has
    returned.
    """
    with contextlib.suppress(OSError):  # it has ended
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
