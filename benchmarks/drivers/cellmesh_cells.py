"""cellmesh in a kernel: cells through `%%dist`."""

from __future__ import annotations

from .kernel import time_cells
from .protocol import Counts, Sample, main


def measure(num_ranks: int, counts: Counts) -> Sample:
    """The mesh is the kernel's own, as it is a user's."""
    return time_cells(
        setup=f"%load_ext cellmesh\n%dist_start {num_ranks}",
        magic="dist",
        teardown="%dist_stop",
        counts=counts,
    )


if __name__ == "__main__":
    main(measure)
