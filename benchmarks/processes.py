"""Finds the processes of one driver, wherever they have been moved to, and weighs them.

Runtimes start sessions of their own, daemonize and let init adopt: parentage does not tell what
belongs to whom. An environment variable that only this driver and what it starts have does.
Standard library only, as drivers import it in every environment.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

MARK = "CELLMESH_BENCHMARK_RUN"


def find_marked(mark: str) -> list[int]:
    """The processes that began with this mark in their environment; zombies have none left."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:  # it ended, or it is not ours to read
                continue
    return found


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def process_name(pid: int) -> str:
    """The name that ``ps`` shows; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def pss_bytes(pid: int) -> int:
    """Memory of a process, shared pages counted by their share (Pss of smaps_rollup); 0 if it is
    gone.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(
                (int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0
            )
    except OSError:
        return 0


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, in seconds, by its clock; 0 if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) has it on Linux
    except OSError:
        return 0.0


def own_tree() -> set[int]:
    """This process and all that it has started, directly or not."""
    return {os.getpid(), *find_marked(os.environ[MARK])}


def own_tree_pss_bytes() -> int:
    """Memory of this process and of all that it has started."""
    return sum(map(pss_bytes, own_tree()))


def wait_for_end(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until processes have ended; returns those that have not."""
    deadline = time.monotonic() + timeout_s
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
        if not ended:
            left.append(pid)
    return left


def kill(pids: Iterable[int]) -> None:
    """Kill processes; those that have gone already are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
