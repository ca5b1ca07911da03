"""How much memory a rank has, how a cell has changed it, and how busy the rank's GPU is."""

from __future__ import annotations

import mmap
import resource
from dataclasses import dataclass

import torch

from ..stdlib import os
from ..wire.messages import MemoryUse
from .gpu_load import UNKNOWN, GpuLoad


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes."""

    rss: int = 0
    peak_rss: int = 0
    allocated: int = 0
    peak_allocated: int = 0
    reserved: int = 0


class MemoryMeter:
    """Reads the memory of this process; make it after the fork.

    A cell pays for two samples (about ten microseconds each without a GPU); calls pay nothing.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu_load: GpuLoad | None = None
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._execution_count = 0
        self._before = Sample()
        self._after: Sample | None = Sample()  # None while a cell runs

    def begin(self, execution_count: int) -> None:
        """A cell begins."""
        self._before = self.sample()
        self._after, self._execution_count = None, execution_count

    def end(self) -> None:
        """The cell has ended."""
        self._after = self.sample()

    def use(self) -> MemoryUse:
        """Memory now, and what the last cell has changed; from any thread."""
        now = self.sample()
        before, after = self._before, self._after or now
        return MemoryUse(
            rss=now.rss,
            peak_rss=now.peak_rss,
            cell_rss=after.rss - before.rss,
            cell_peak_rss=after.peak_rss - before.peak_rss,
            execution_count=self._execution_count,
            allocated=now.allocated,
            peak_allocated=now.peak_allocated,
            reserved=now.reserved,
            cell_allocated=after.allocated - before.allocated,
        )

    def device_percent(self) -> int:
        """How busy the rank's GPU is; `UNKNOWN` without one, or before the rank has used it."""
        if not self._has_gpu():
            return UNKNOWN
        if self._gpu_load is None:
            self._gpu_load = GpuLoad(str(torch.cuda.get_device_properties(self._device).uuid))
        return self._gpu_load.percent()

    def sample(self) -> Sample:
        """Memory now."""
        rss = int(os.pread(self._statm, 100, 0).split()[1]) * mmap.PAGESIZE
        peak_rss = max(rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if not self._has_gpu():
            return Sample(rss, peak_rss)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Sample(rss, peak_rss, allocated["current"], allocated["peak"], reserved["current"])

    def _has_gpu(self) -> bool:
        """Whether there is one that the rank has used: looking at it would take it into use."""
        return self._device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
