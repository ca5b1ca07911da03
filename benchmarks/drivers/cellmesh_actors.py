"""cellmesh: methods of an actor on each of `num_ranks` ranks beside calls of functions, also beside
calls that wait; and heals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import cellmesh

from .bulk import check_seen
from .protocol import NUM_SENDS, Counts, Sample, elapsed_s, main, summarize, time_calls

_BATCH = 20
_NUM_WAITING = 4  # calls that wait, on each rank
_NUM_HEALS = 5
_LIMIT_S = 60.0


def noop() -> None:
    """Do nothing."""


class Worker:
    """Does nothing, on request, and counts."""

    def __init__(self) -> None:
        self._num = 0

    def noop(self) -> None:
        """Do nothing."""

    async def wait(self) -> None:
        """Wait beside other work."""
        await asyncio.Event().wait()

    def add(self) -> None:
        """Count."""
        self._num += 1

    def take_count(self) -> int:
        """Return the count, and begin again."""
        num, self._num = self._num, 0
        return num


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Calls of a mesh without actors, then of one with: in turn, a batch of each kind."""
    with cellmesh.start(num_ranks) as mesh:
        bare_s = time_calls(lambda: mesh.run(noop), counts)
        worker = mesh.spawn(Worker)
        taken_s: dict[str, list[float]] = {}

        def batch(name: str, call: Callable[[], object]) -> None:
            call()
            taken_s.setdefault(name, []).extend(elapsed_s(call) for _ in range(_BATCH))

        for _ in range(counts.num_calls // _BATCH + 1):
            batch("run", lambda: mesh.run(noop))
            batch("method", worker.noop)
            waiting = [worker.wait.submit() for _ in range(_NUM_WAITING)]
            batch("run_beside", lambda: mesh.run(noop))
            batch("method_beside", worker.noop)
            for run in waiting:
                run.cancel()

        def send() -> None:
            for _ in range(NUM_SENDS):
                worker.add.send()
            check_seen(worker.take_count().list, [NUM_SENDS] * num_ranks)

        sample = {
            **summarize("call", bare_s),
            **summarize("sends", [elapsed_s(send) for _ in range(1 + counts.num_transfers)][1:]),
        }
        for name, times in taken_s.items():
            sample |= summarize(name, times[_BATCH:])  # the first are to warm up
        sample["heal_s"] = statistics.median(_heal_s(mesh, worker) for _ in range(_NUM_HEALS))
    return sample


def _heal_s(mesh: cellmesh.Mesh, worker: Any) -> float:
    """Kill the last rank, and time the heal; calls that wait on the other ranks go on."""
    waiting = [worker[:-1].wait.submit() for _ in range(_NUM_WAITING)]
    os.kill(mesh[-1].run(os.getpid), signal.SIGKILL)
    deadline = time.monotonic() + _LIMIT_S
    while not mesh.rank_set.session.dead_ranks:
        if time.monotonic() > deadline:
            raise RuntimeError("a rank that was killed is not reported")
        time.sleep(0.001)
    taken_s = elapsed_s(mesh.heal)
    if any(run.done() for run in waiting):
        raise RuntimeError("a call does not wait on the ranks that live")
    for run in waiting:
        run.cancel()
    return taken_s


if __name__ == "__main__":
    main(measure)
