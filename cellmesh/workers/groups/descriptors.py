"""Counts free descriptors before gloo connects, as gloo aborts the process when there are too
few.

So they are counted before, and where there may be too few, groups are not connected.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

from ...stdlib import os, time

# Of each group, besides a connection to each member: gloo's listening socket, its loop's, its
# rendezvous'.
A_GROUP = 8
# For Python itself, and for files that user threads open while groups are connected.
_SPARE = 16
# What retired groups hold is closed in the background.
_PATIENCE_S, _LOOK_S = 1.0, 0.02


def find_lack(sizes: Iterable[int], num_coming: int = 0) -> str:
    """Why this rank has too few descriptors to connect groups of these sizes; "" if it has enough.

    Args:
        sizes: numbers of members.
        num_coming: descriptors that will be closed before.
    """
    needed = _SPARE + sum(A_GROUP + size for size in sizes)
    deadline = time.monotonic() + _PATIENCE_S
    while (num_free := count_free() + num_coming) < needed:
        if time.monotonic() > deadline:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"{max(0, num_free)} of {limit} descriptors are free, and connecting process "
                f"groups needs {needed}: close files and sockets there, or start the mesh under a "
                "higher `ulimit -n`"
            )
        time.sleep(_LOOK_S)
    return ""


def count_free() -> int:
    """How many descriptors this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        return limit - sum(int(entry) < limit for entry in os.listdir("/proc/self/fd"))
    except OSError:  # not even one to list them
        return 0
