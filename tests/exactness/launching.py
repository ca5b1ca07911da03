"""Run as ``python launching.py NUM_RANKS SCRIPT FOLDER [SCRIPT FOLDER ...]``: runs scripts, keeps losses.

Each rank finds what torchrun sets; but it is forked from a process that has imported what takes long: on two
cores, importing it in each of eight ranks takes longer than training. ``tests/mesh/test_export.py`` runs
exported scripts by torchrun itself.

Each rank leaves ``FOLDER/RANK.json``: the script's `losses`, exactly, as `float.hex` writes them.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401
from torch.distributed import TCPStore

_STORE_S = 60.0


def main() -> None:
    """Run the scripts, one after the other."""
    num_ranks, *pairs = sys.argv[1:]
    for script, folder in zip(pairs[::2], pairs[1::2], strict=True):
        # Apart, as its store has threads: who has threads must not fork.
        pid = fork(lambda script=script, folder=folder: launch(int(num_ranks), Path(script), Path(folder)))
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"{script} failed")


def launch(num_ranks: int, script: Path, folder: Path) -> None:
    """Run one script on all ranks."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"there are {len(threads)} threads before the fork"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        pids = [fork(lambda rank=rank: run(rank, shared, script, folder)) for rank in range(num_ranks)]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_S),
            master_listen_fd=os.dup(listener.fileno()),
        )
    living, failed = set(pids), False
    while living:
        pid, status = os.wait()
        living.discard(pid)
        if status and not failed:
            failed = True
            for other in living:
                os.kill(other, signal.SIGKILL)
    del store
    if failed:
        raise SystemExit(1)


def run(rank: int, shared: dict[str, str], script: Path, folder: Path) -> None:
    """On each rank: run the script as if it had been given to torchrun."""
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[:] = [str(script)]
    sys.path[0] = str(script.parent)
    names = runpy.run_path(str(script), run_name="__main__")
    losses = [float(loss).hex() for loss in names["losses"]]
    (folder / f"{rank}.json").write_text(json.dumps(losses))


def fork(action: Callable[[], None]) -> int:
    """Do something in a process of its own, which ends with it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not by way of Python's end: gloo's threads still run


if __name__ == "__main__":
    main()
