"""cellmesh from plain Python: start, calls, memory, restart."""

from __future__ import annotations

import statistics
import time

from ..processes import own_tree_pss_bytes
from .protocol import (
    SMALL_ARGUMENT,
    Counts,
    Sample,
    calls_per_s,
    elapsed_s,
    main,
    measure_calls,
)

_NUM_RESTARTS = 3


def noop() -> None:
    """What every rank is asked to do."""


def take(argument: bytes) -> None:
    """The same, with an argument."""


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Ready means: torch imported and the process group up on every rank, each of which has
    answered.
    """
    began = time.perf_counter()
    import cellmesh

    import_s = time.perf_counter() - began
    began = time.perf_counter()
    mesh = cellmesh.start(num_ranks)
    start_s = time.perf_counter() - began
    with mesh:
        return {
            "import_s": import_s,
            "start_s": start_s,
            **measure_calls(lambda: mesh.run(noop), counts),
            "pss_bytes": own_tree_pss_bytes(),
            "calls_per_s": calls_per_s(lambda: mesh.submit(noop), lambda run: run.result(), counts),
            "calls_1kb_per_s": calls_per_s(
                lambda: mesh.submit(take, SMALL_ARGUMENT), lambda run: run.result(), counts
            ),
            "restart_s": statistics.median(elapsed_s(mesh.restart) for _ in range(_NUM_RESTARTS)),
        }


if __name__ == "__main__":
    main(measure)
