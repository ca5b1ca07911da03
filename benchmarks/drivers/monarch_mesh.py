"""Monarch: an actor on each of `num_ranks` processes of this host."""

from __future__ import annotations

import time
from typing import Any

from ..processes import own_tree_pss_bytes
from .bulk import Seen, time_push
from .protocol import SMALL_ARGUMENT, Counts, Sample, calls_per_s, main, measure_calls

_began = time.perf_counter()
from monarch.actor import Actor, endpoint, this_host  # type: ignore[import-not-found]  # noqa: E402

_IMPORT_S = time.perf_counter() - _began


class Worker(Actor):  # type: ignore[misc]
    """Does nothing, on request."""

    @endpoint  # type: ignore[untyped-decorator]
    def noop(self) -> None:
        """What every rank is asked to do."""

    @endpoint  # type: ignore[untyped-decorator]
    def take(self, argument: bytes) -> None:
        """The same, with an argument."""

    @endpoint  # type: ignore[untyped-decorator]
    def see(self, array: Any) -> Seen:
        """The array is in memory of this process's own."""
        return array.nbytes, float(array[-1])

    @endpoint  # type: ignore[untyped-decorator]
    def import_torch(self) -> None:
        """Ready means that torch is there."""
        import torch  # noqa: F401


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Ready means: torch imported in every process, each of which has answered. There is no process
    group.
    """
    began = time.perf_counter()
    processes = this_host().spawn_procs(per_host={"gpus": num_ranks})
    workers = processes.spawn("workers", Worker)
    workers.import_torch.call().get()
    start_s = time.perf_counter() - began
    sample = {
        "import_s": _IMPORT_S,
        "start_s": start_s,
        **measure_calls(lambda: workers.noop.call().get(), counts),
        "pss_bytes": own_tree_pss_bytes(),
        "calls_per_s": calls_per_s(workers.noop.call, lambda future: future.get(), counts),
        "calls_1kb_per_s": calls_per_s(
            lambda: workers.take.call(SMALL_ARGUMENT), lambda future: future.get(), counts
        ),
        **time_push(lambda array: [*workers.see.call(array).get().values()], num_ranks, counts),
    }
    processes.stop().get()
    return sample


if __name__ == "__main__":
    main(measure)
