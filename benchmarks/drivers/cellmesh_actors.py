"""cellmesh: methods of an actor on each of `num_ranks` ranks beside calls of functions, also beside
calls that wait; from rank to rank; and heals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cellmesh

from .bulk import check_seen
from .protocol import NUM_SENDS, Counts, Sample, elapsed_s, main, summarize, time_calls

_BATCH = 20
_NUM_WAITING = 4  # calls that wait, on each rank
_NUM_HEALS = 5
_LIMIT_S = 60.0
_WEIGHTS = "import torch\nweights = [torch.ones(1024, 1024) for _ in range(24)]"  # 100 MB


def noop() -> None:
    """Do nothing."""


class Worker:
    """Does nothing, on request, counts, and calls another; it has place for weights."""

    def __init__(self) -> None:
        import torch

        self._num = 0
        self.weights = [torch.empty(1024, 1024) for _ in range(24)]

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

    def time_other(self, other: Any, counts: Counts) -> list[float]:
        """Time calls of another actor's method."""
        return time_calls(other.noop, counts)


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
            _end(waiting)

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
        with cellmesh.start(1) as other:
            peer = other.spawn(Worker, name="peer")
            sample |= summarize("other", worker[0].time_other(peer, counts))
            other.cell(_WEIGHTS)
            times = [_restart_s(mesh, other) for _ in range(_NUM_HEALS)]
            sample["restart_s"] = statistics.median(times)
    return sample


def _heal_s(mesh: cellmesh.Mesh, worker: Any) -> float:
    """Kill the last rank, and time the heal."""
    with _waiting_beside(worker):
        os.kill(mesh[-1].run(os.getpid), signal.SIGKILL)
        deadline = time.monotonic() + _LIMIT_S
        while not mesh.rank_set.session.dead_ranks:
            if time.monotonic() > deadline:
                raise RuntimeError("a rank that was killed is not reported")
            time.sleep(0.001)
        return elapsed_s(mesh.heal)


def _restart_s(mesh: cellmesh.Mesh, source: cellmesh.Mesh) -> float:
    """Kill the last rank, and time from there until a new one has its actor, and in this the
    weights of another mesh.
    """
    is_there = threading.Event()

    def bring_weights(worker: Any, ranks: Sequence[int]) -> None:
        source.copy("weights", to=mesh[ranks], into="worker.weights").result()
        is_there.set()

    worker = mesh.spawn(Worker, on_death=bring_weights)
    pid = mesh[-1].run(os.getpid)
    with _waiting_beside(worker):
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        if not is_there.wait(_LIMIT_S):
            raise RuntimeError("an actor of a rank that was killed is not made again")
        taken_s = time.perf_counter() - began
        mesh.heal()  # returns once the supervisor has finished
    return taken_s


@contextlib.contextmanager
def _waiting_beside(worker: Any) -> Iterator[None]:
    """Have calls wait on all ranks but the last; they go on while the last is replaced."""
    waiting = [worker[:-1].wait.submit() for _ in range(_NUM_WAITING)]
    yield
    if any(run.done() for run in waiting):
        raise RuntimeError("a call does not wait on the ranks that live")
    _end(waiting)


def _end(waiting: Sequence[cellmesh.Run[Any]]) -> None:
    """Cancel calls, and wait until they have ended: what is timed next would wait for that."""
    for run in waiting:
        run.cancel()
    for run in waiting:
        run.wait()


if __name__ == "__main__":
    main(measure)
