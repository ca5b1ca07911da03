"""Measures a rank's memory, and its change during a cell."""

from __future__ import annotations

import mmap
import resource
from typing import Any, NamedTuple

import torch

from ...stdlib import os
from ...wire.status import MemoryUse


class _Reading(NamedTuple):
    """A rank's memory use at one moment, as raw text of the system; parsed only when a user asks
    for it.
    """

    statm: bytes = b"0 0"
    usage: Any = None
    gpu: Any = None

    def parse(self) -> dict[str, int]:
        """Return the memory use at this moment as the fields of `MemoryUse`, in bytes."""
        rss = int(self.statm.split()[1]) * mmap.PAGESIZE
        peak_rss = max(rss, self.usage.ru_maxrss * 1024) if self.usage is not None else rss
        gpu = self.gpu or {}
        allocated = gpu.get("allocated_bytes", {}).get("all", {})
        return {
            "rss": rss,
            "peak_rss": peak_rss,
            "allocated": allocated.get("current", 0),
            "peak_allocated": allocated.get("peak", 0),
            "reserved": gpu.get("reserved_bytes", {}).get("all", {}).get("current", 0),
        }


class MemoryMeter:
    """Measures the memory of this rank; must be made after the fork.

    A cell costs a sample (about ten microseconds without a GPU), or two if it does not follow
    another one; calls cost none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._execution_count, self._run = 0, -1
        self._before = _Reading()
        self._after: _Reading | None = _Reading()  # None while a cell runs

    def begin(self, execution_count: int, run: int) -> None:
        """Record the memory at the start of a cell, the rank's `run`-th run."""
        is_next, self._run = run == self._run + 1, run
        self._before = (is_next and self._after) or self._read()
        self._after, self._execution_count = None, execution_count

    def end(self) -> None:
        """Record the memory at the end of a cell."""
        self._after = self._read()

    def use(self) -> MemoryUse:
        """Return the rank's current memory use, and its change during the last cell. Usable on any
        thread.
        """
        now, before = self._read().parse(), self._before.parse()
        after = self._after.parse() if self._after is not None else now
        return MemoryUse(
            **now,
            execution_count=self._execution_count,
            cell_rss=after["rss"] - before["rss"],
            cell_peak_rss=after["peak_rss"] - before["peak_rss"],
            cell_allocated=after["allocated"] - before["allocated"],
        )

    def _read(self) -> _Reading:
        stats = None
        # If the rank has not used its GPU, a query would initialize CUDA.
        if self._is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return _Reading(
            os.pread(self._statm, 100, 0), resource.getrusage(resource.RUSAGE_SELF), stats
        )
