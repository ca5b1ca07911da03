"""cellmesh in a kernel: `%dist_start` when torch has been imported in the background, and after a
stop.
"""

from __future__ import annotations

import statistics

from .kernel import open_kernel
from .protocol import Counts, Sample, main

_NUM_STARTS = 3  # after a stop

# The zygote that `%load_ext` has begun is there once it has imported torch.
_WAIT = (
    "assert get_ipython().cellmesh_prestart.prepare(60.0), "
    "'torch was not imported in the background'"
)
_START = """
from benchmarks.drivers.protocol import elapsed_s
_start_s = elapsed_s(lambda: get_ipython().run_line_magic("dist_start", "{num_ranks}"))
"""


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Timed in the kernel, from the magic's beginning to its end: the group is up on every rank
    then.
    """
    with open_kernel() as execute:
        execute("%load_ext cellmesh")
        execute(_WAIT)
        starts_s = []
        for _ in range(1 + _NUM_STARTS):
            starts_s.append(float(execute(_START.format(num_ranks=num_ranks), "str(_start_s)")))
            execute("%dist_stop")
    hidden_s, *kept_s = starts_s
    return {"hidden_start_s": hidden_s, "kept_start_s": statistics.median(kept_s)}


if __name__ == "__main__":
    main(measure)
