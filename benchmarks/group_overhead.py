"""What an all_reduce costs through our group object, beside torch's own.

``python -m benchmarks.group_overhead``: four ranks on gloo; with ``--nccl``, one rank on a GPU.
Both kinds of group are there at once, in the same processes, and are measured in turn, a batch
each, so that what else the machine does meets both alike. What is told is the difference.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from benchmarks.machine import describe_machine
from cellmesh.workers.groups.group_factory import choose_placement
from cellmesh.workers.groups.groups import Groups
from cellmesh.workers.groups.healable_group import HealableGroup

NUM_RANKS = 4
# Bytes of the tensor, calls in a batch, batches of each kind.
SIZES = ((4, 50, 40), (4096, 50, 40), (1 << 20, 10, 40))


def _time_batch(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    num_calls: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    start = clock()
    for _ in range(num_calls):
        dist.all_reduce(tensor, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return (clock() - start) / num_calls


class _Nothing(dist.ProcessGroup):
    """A group whose operations have ended when they begin."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._done = FakeWork()

    def allreduce(self, *args: object) -> dist.Work:  # type: ignore[override]
        return self._done


def _calls_alone(group: HealableGroup) -> float:
    """What our object adds to a call, where the group does nothing: by this thread's own time."""
    nothing, tensor = _Nothing(), torch.zeros(1)
    inner, group._inner = group._inner, nothing
    try:
        pairs = [
            (
                _time_batch(group, tensor, 500, time.thread_time),
                _time_batch(nothing, tensor, 500, time.thread_time),
            )
            for _ in range(60)
        ]
    finally:
        group._inner = inner
    return statistics.median(ours - theirs for ours, theirs in pairs)


def _measure(rank: int, port: int, pipe: Connection, backend: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    num_ranks, num_gpus = (1, 1) if backend == "nccl" else (NUM_RANKS, 0)
    placement = choose_placement(backend, rank, num_ranks, num_gpus)
    groups = Groups(rank, num_ranks, placement, port, 0)
    groups.initialize()
    ours = dist.group.WORLD
    assert isinstance(ours, HealableGroup)
    # The plain group that ours works through: the same connections and threads.
    plain = ours.inner
    dist.distributed_c10d._register_pg_in_world(
        plain,
        backend_name=backend,
        store=None,  # type: ignore[arg-type]
        group_name="plain",  # type: ignore[arg-type]
        backend_config=f"{placement.device.type}:{backend}",
        rank_mapping={i: i for i in range(num_ranks)},
    )
    rows = []
    for num_bytes, num_calls, num_batches in SIZES:
        tensor = torch.ones(num_bytes // 4, device=placement.device)
        for group in (plain, ours):
            _time_batch(group, tensor, num_calls)
        pairs = []
        for batch in range(num_batches):
            order = (plain, ours) if batch % 2 else (ours, plain)
            timed = {group: _time_batch(group, tensor, num_calls) for group in order}
            pairs.append((timed[plain], timed[ours]))
        rows.append((num_bytes, pairs))
    pipe.send((rows, _calls_alone(ours)))
    pipe.recv()
    os._exit(0)


def _run(backend: str) -> tuple[list[tuple[int, list[tuple[float, float]]]], float]:
    fork = multiprocessing.get_context("fork")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            None,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    pipes, processes = [], []
    for rank in range(1 if backend == "nccl" else NUM_RANKS):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_measure, args=(rank, store.port, theirs, backend))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.group_overhead", description=__doc__
    )
    parser.add_argument(
        "--nccl", action="store_true", help="one rank on a GPU, instead of four on gloo"
    )
    options = parser.parse_args(arguments)
    rows, alone_s = _run("nccl" if options.nccl else "gloo")
    print(", ".join(describe_machine().values()))
    print(f"{'tensor':>10} {'torch':>12} {'ours':>12} {'difference':>12} {'':>8}")
    for num_bytes, pairs in rows:
        plain = statistics.median(pair[0] for pair in pairs)
        difference = statistics.median(ours - theirs for theirs, ours in pairs)
        print(
            f"{num_bytes:>8} B {plain * 1e6:>9.1f} us {(plain + difference) * 1e6:>9.1f} us "
            f"{difference * 1e6:>9.1f} us {100 * difference / plain:>6.2f} %"
        )
    print(f"a call of our object alone, without communication: {alone_s * 1e6:.2f} us")


if __name__ == "__main__":
    main()
