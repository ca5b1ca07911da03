"""Ray, for large values: an array put into its object store, and fetched by an actor for each
rank.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import ray  # type: ignore[import-not-found]

from .bulk import ARRAY_BYTES, Seen, time_push
from .protocol import Counts, Sample, main

_STORE_BYTES = 16 * ARRAY_BYTES


class Worker:
    """Sees arrays."""

    def see(self, array: Any) -> Seen:
        """The array is in the object store, mapped by this process; Ray does not allow writing to
        it.
        """
        return array.nbytes, float(array[-1])


@contextlib.contextmanager
def open_ray(num_ranks: int) -> Iterator[None]:
    """Ray on this machine, with a CPU for an actor of each rank."""
    # A token of its own, as Ray would else write one into the user's home.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray.init(
        num_cpus=num_ranks,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Each array is put once, and its object freed when all have seen it."""
    with open_ray(num_ranks):
        workers = [ray.remote(Worker).remote() for _ in range(num_ranks)]

        def push(array: Any) -> Sequence[Seen]:
            reference = ray.put(array)
            seen: Sequence[Seen] = ray.get([worker.see.remote(reference) for worker in workers])
            return seen

        ray.get([worker.__ray_ready__.remote() for worker in workers])
        return time_push(push, num_ranks, counts)


if __name__ == "__main__":
    main(measure)
