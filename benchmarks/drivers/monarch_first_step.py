"""Monarch: from the start of its processes until an actor on each has taken a first step."""

from __future__ import annotations

import os
import time

from monarch.actor import (  # type: ignore[import-not-found]
    Actor,
    current_rank,
    endpoint,
    this_host,
)

from .bulk import check_seen
from .first_step import ONE_THREAD, free_port, run_as_rank
from .protocol import Counts, Sample, main


class Worker(Actor):  # type: ignore[misc]
    """A rank, once it has a process group."""

    @endpoint  # type: ignore[untyped-decorator]
    def first_step(self, num_ranks: int, port: int) -> float:
        """The program's loss."""
        return run_as_rank(current_rank().rank, num_ranks, port)


def measure(num_ranks: int, counts: Counts) -> Sample:
    """The process group is made by hand, in the program."""
    os.environ.update(ONE_THREAD)
    began = time.perf_counter()
    processes = this_host().spawn_procs(per_host={"gpus": num_ranks})
    workers = processes.spawn("workers", Worker)
    losses = [*workers.first_step.call(num_ranks, free_port()).get().values()]
    taken_s = time.perf_counter() - began
    check_seen(losses, losses[:1] * num_ranks)
    processes.stop().get()
    return {"step_s": taken_s}


if __name__ == "__main__":
    main(measure)
