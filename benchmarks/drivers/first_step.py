"""What all drivers do alike for a first step: the program, its process group, and when it is done.

Everyone has one thread a rank and gloo on the loopback interface.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "programs" / "first_step.py"
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--local-addr", "127.0.0.1", "--nproc-per-node"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_as_rank(rank: int, num_ranks: int, port: int) -> float:
    """Run the program on a rank of a peer that makes no process group; return the loss.

    Args:
        rank: own rank.
        num_ranks: number of ranks.
        port: where rank 0 is to serve the store.
    """
    os.environ.update(
        ONE_THREAD,
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    names: dict[str, float] = {}
    exec(compile(PROGRAM.read_text(), str(PROGRAM), "exec"), names)
    return names["loss"]


def free_port() -> int:
    """A port of this host that nobody uses."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def printed_after_s(command: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Run a command; yield its lines, each with the time since the command was called."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield time.perf_counter() - began, line
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}")
