"""ipyparallel: from the start of a cluster until each engine has taken a first step."""

from __future__ import annotations

import os
import time

import ipyparallel  # type: ignore[import-not-found]

from .bulk import check_seen
from .first_step import ONE_THREAD, free_port, run_as_rank
from .protocol import Counts, Sample, main


def measure(num_ranks: int, counts: Counts) -> Sample:
    """The process group is made by hand, in the program."""
    os.environ.update(ONE_THREAD)
    began = time.perf_counter()
    cluster = ipyparallel.Cluster(n=num_ranks, log_level=40)
    client = cluster.start_and_connect_sync()
    everyone = range(num_ranks)
    losses = client[:].map_sync(
        run_as_rank, everyone, [num_ranks] * num_ranks, [free_port()] * num_ranks
    )
    taken_s = time.perf_counter() - began
    check_seen(losses, losses[:1] * num_ranks)
    client.close()
    cluster.stop_cluster_sync()
    return {"step_s": taken_s}


if __name__ == "__main__":
    main(measure)
