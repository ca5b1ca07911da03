"""The memory of processes on this host."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes, shared pages counted once (PSS); RSS where PSS cannot be
    read.

    Args:
        pids: the processes; those that have gone count nothing.
    """
    total = 0
    for pid in pids:
        try:
            total += _pss_bytes(pid)
        except (OSError, ValueError):
            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
    return total


def children_of(pid: int) -> list[int]:
    """Return the children of a process, and theirs; none of a process that has gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == "Pss":
                return int(rest.split()[0]) * 1024
    raise ValueError("no Pss in smaps_rollup")
