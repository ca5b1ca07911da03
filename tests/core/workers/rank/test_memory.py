"""The memory of a rank."""

from __future__ import annotations

import torch

from cellmesh.workers.rank.memory import MemoryMeter


def test_memory_of_a_run_between_two_cells_is_not_that_of_the_second() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    meter.begin(execution_count=1, run=1)
    meter.end()
    of_run_2 = bytearray(b"x" * (64 << 20))
    meter.begin(execution_count=2, run=3)
    meter.end()
    assert meter.use().cell_rss < len(of_run_2) / 2
    meter.begin(execution_count=3, run=4)
    of_run_4 = bytearray(b"x" * (64 << 20))
    meter.end()
    assert meter.use().cell_rss > len(of_run_4) / 2
