"""cellmesh from plain Python, with many ranks: a start, and the memory of the tree."""

from __future__ import annotations

import time

from ..processes import own_tree_pss_bytes
from .protocol import Counts, Sample, main


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Ready is what it is in `cellmesh_mesh`."""
    import cellmesh

    began = time.perf_counter()
    with cellmesh.start(num_ranks):
        return {"start_s": time.perf_counter() - began, "pss_bytes": own_tree_pss_bytes()}


if __name__ == "__main__":
    main(measure)
