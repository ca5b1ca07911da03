"""cellmesh: 100 MB of weights, FSDP2 on four ranks, copied to two that hold them whole or tensor
parallel, beside the same memcpys, in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from .protocol import Counts, Sample, elapsed_s, main

_NUM_SOURCES, _NUM_TARGETS = 4, 2
_NUM_WARMUPS = 2
_MODEL = """
import numpy as np, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.set_num_threads(1)
def make():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])
ones = np.ones(24 << 20, "f4")
copied = np.zeros_like(ones)
"""
_SOURCES = """
model = make()
for layer in model:
    fully_shard(layer)
_ = fully_shard(model)
"""
_TARGETS = """
whole = make()
ways = {str(n): RowwiseParallel() if n % 2 else ColwiseParallel() for n in range(24)}
parallel = parallelize_module(make(), mesh, ways)
"""
_MEMCPY = "np.copyto(copied[: len(ones) // {num}], ones[: len(ones) // {num}])"


def measure(num_ranks: int, counts: Counts) -> Sample:
    """A memcpy of each source's share, then of each target's, both into pages that are there."""
    import cellmesh

    with cellmesh.start(_NUM_SOURCES) as sources, cellmesh.start(_NUM_TARGETS) as targets:
        sources.cell(_MODEL + _SOURCES)
        targets.cell(_MODEL + _TARGETS)

        def memcpys(num: int) -> None:
            sources.cell(_MEMCPY.format(num=_NUM_SOURCES))
            targets.cell(_MEMCPY.format(num=num))

        ways: dict[str, Callable[[], object]] = {
            "whole": lambda: sources.copy("model", to=targets, into="whole").result(),
            "whole_memcpys": lambda: memcpys(1),
            "parallel": lambda: sources.copy("model", to=targets, into="parallel").result(),
            "parallel_memcpys": lambda: memcpys(_NUM_TARGETS),
        }
        taken_s: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_NUM_WARMUPS + 4 * counts.num_transfers):
            for name, way in ways.items():
                taken_s[name].append(elapsed_s(way))
    sample = {f"{n}_s": statistics.median(times[_NUM_WARMUPS:]) for n, times in taken_s.items()}
    return sample | {
        f"{name}_share": sample[f"{name}_memcpys_s"] / sample[f"{name}_s"]
        for name in ("whole", "parallel")
    }


if __name__ == "__main__":
    main(measure)
