"""Run as ``python launching.py [MODULE ...]``: runs scripts on ranks, and answers with what they
computed.

Each rank finds what torchrun sets; but it is forked from a process that has imported what takes
long (torch, and the modules that are named): on two cores, importing it in each of eight ranks
takes longer than training. ``tests/mesh/test_export.py`` runs exported scripts by torchrun itself.

On stdin come jobs, one a line (`Job` as JSON); for each, stdout answers with one line, "" or what
failed, and each rank leaves ``FOLDER/RANK.json``: its `losses`, exactly, as `float.hex` writes
them, followed by the numbers in its `parameters`, if the script has any. What scripts print goes to
stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_STORE_S = 60.0
# What takes long to import, of torch.
_TORCH = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
# What a program has computed, of the names that it leaves.
EXACT = (
    "[float(x).hex() for x in losses] + [x.hex() for each in globals().get('parameters', ()) "
    "for x in each.detach().double().flatten().tolist()]"
)


@dataclass(frozen=True)
class Job:
    """A script to run.

    Ranks leave their results in the folder, which may be their working directory, too.
    """

    script: str
    folder: str
    num_ranks: int
    argv: tuple[str, ...] = ()
    in_folder: bool = False


def main() -> None:
    """Run the jobs, one after the other."""
    for module in (*_TORCH, *sys.argv[1:]):
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        # Apart, as its store has threads: who has threads must not fork.
        pid = fork(lambda job=job: launch(job))
        _, status = os.waitpid(pid, 0)
        print(f"{job.script} failed" if status else "", file=answers, flush=True)


def launch(job: Job) -> None:
    """Run one script on all ranks."""
    from torch.distributed import TCPStore

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"there are {len(threads)} threads before the fork"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_WORLD_SIZE": str(job.num_ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
        }
        pids = [fork(lambda rank=rank: run(rank, shared, job)) for rank in range(job.num_ranks)]
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


class KeptGroups(dict[Any, Any]):
    """torch's table of process groups, whose groups live as long as the process.

    Where a script's model dies after `destroy_process_group`, it is the last that holds its group:
    torch ends the group's threads under the interpreter's lock, and one of them may wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def __setitem__(self, group: Any, value: Any) -> None:
        self._kept.append(group)
        super().__setitem__(group, value)


def run(rank: int, shared: dict[str, str], job: Job) -> None:
    """On each rank: run the script as if it had been given to torchrun."""
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[:] = [job.script, *job.argv]
    sys.path[0] = str(Path(job.script).parent)
    if job.in_folder:
        os.chdir(job.folder)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = job.script
    names = vars(module)
    sys.modules["torch.distributed.distributed_c10d"]._pg_map = KeptGroups()
    try:
        source = Path(job.script).read_text()
        exec(compile(source, job.script, "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code:
            raise
    (Path(job.folder) / f"{rank}.json").write_text(json.dumps(eval(EXACT, names)))


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
