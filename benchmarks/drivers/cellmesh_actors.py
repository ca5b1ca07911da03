"""cellmesh: calls of functions, also beside calls that wait, and a heal beside these."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable

import cellmesh

from .protocol import Counts, Sample, elapsed_s, main, summarize

_BATCH = 20
_NUM_WAITING = 4  # calls that wait, on each rank
_NUM_HEALS = 5
_LIMIT_S = 60.0


def noop() -> None:
    """Do nothing."""


async def wait() -> None:
    """Wait beside other work."""
    await asyncio.Event().wait()


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Calls are made in turn, a batch of each kind."""
    with cellmesh.start(num_ranks) as mesh:
        taken_s: dict[str, list[float]] = {}

        def batch(name: str, call: Callable[[], object]) -> None:
            call()
            taken_s.setdefault(name, []).extend(elapsed_s(call) for _ in range(_BATCH))

        for _ in range(counts.num_calls // _BATCH + 1):
            batch("call", lambda: mesh.run(noop))
            waiting = [mesh.submit(wait) for _ in range(_NUM_WAITING)]
            batch("call_beside", lambda: mesh.run(noop))
            for run in waiting:
                run.cancel()
        sample: Sample = {}
        for name, times in taken_s.items():
            sample |= summarize(name, times[_BATCH:])  # the first are to warm up
        sample["heal_s"] = statistics.median(_heal_s(mesh) for _ in range(_NUM_HEALS))
    return sample


def _heal_s(mesh: cellmesh.Mesh) -> float:
    """Kill a rank, and time the heal; calls that wait on the other ranks go on."""
    waiting = [mesh.submit(wait) for _ in range(_NUM_WAITING)]
    os.kill(mesh[1].run(os.getpid), signal.SIGKILL)
    deadline = time.monotonic() + _LIMIT_S
    while not mesh.rank_set.session.dead_ranks:
        if time.monotonic() > deadline:
            raise RuntimeError("a rank that was killed is not reported")
        time.sleep(0.001)
    taken_s = elapsed_s(mesh.heal)
    if any(run.waiting_ranks() != [0, *range(2, len(mesh.ranks))] for run in waiting):
        raise RuntimeError("a call does not wait on the ranks that live")
    for run in waiting:
        run.cancel()
    return taken_s


if __name__ == "__main__":
    main(measure)
