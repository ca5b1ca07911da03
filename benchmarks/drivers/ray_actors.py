"""Ray: methods of `num_ranks` actors, from the driver and from one of them to another."""

from __future__ import annotations

from typing import Any

from .protocol import Counts, Sample, main, summarize, time_calls
from .ray_mesh import open_ray, ray


class Worker:
    """Does nothing, on request, and has another do nothing."""

    def noop(self) -> None:
        """Do nothing."""

    def time_other(self, other: Any, counts: Counts) -> list[float]:
        """Time calls of another actor's method."""
        return time_calls(lambda: ray.get(other.noop.remote()), counts)


def measure(num_ranks: int, counts: Counts) -> Sample:
    """A call of all is a call of each, of which the driver awaits the results together."""
    with open_ray(num_ranks):
        workers = [ray.remote(Worker).remote() for _ in range(num_ranks)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])

        def call() -> None:
            ray.get([worker.noop.remote() for worker in workers])

        calls_s = time_calls(call, counts)
        others_s = ray.get(workers[0].time_other.remote(workers[1], counts))
    return {**summarize("method", calls_s), **summarize("other", others_s)}


if __name__ == "__main__":
    main(measure)
