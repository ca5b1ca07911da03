"""Scripts run on ranks that are forked from one process, which has imported torch
(`launching.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.exactness.comparing import Losses
from tests.exactness.launching import Job

TIMEOUT_S = 200.0


@contextlib.contextmanager
def launcher(where: Path, *modules: str) -> Iterator[Callable[[Job], Losses]]:
    """Yield a function that runs scripts in a directory, and returns the losses of each rank.

    The process behind it imports the modules before it forks ranks.
    """
    command = [sys.executable, str(Path(__file__).with_name("launching.py")), *modules]
    started: list[subprocess.Popen[str]] = []  # the last one works

    def start() -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, cwd=where, text=True, start_new_session=True, **pipes)
        started.append(process)
        return process

    def run(job: Job) -> Losses:
        process = started[-1] if started[-1].poll() is None else start()
        assert process.stdin is not None
        assert process.stdout is not None
        before = log.seek(0, os.SEEK_END)
        print(json.dumps(dataclasses.asdict(job)), file=process.stdin, flush=True)
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        answer = process.stdout.readline() if readable else f"{job.script} has not ended\n"
        if not readable:
            _kill(process)  # the next script has another
        log.seek(before)
        assert answer == "\n", f"{answer or 'the launcher ended'}\n{log.read()[-5000:]}"
        return results_of(Path(job.folder), job.num_ranks)

    with tempfile.TemporaryFile("w+") as log:
        try:
            start()
            yield run
            if (process := started[-1]).poll() is None:
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(TIMEOUT_S) == 0
        finally:
            for process in started:
                _kill(process)


def results_of(folder: Path, num_ranks: int) -> Losses:
    """Read the losses that each rank has left in a folder."""
    left = [(folder / f"{rank}.json").read_text() for rank in range(num_ranks)]
    return {rank: list(map(float.fromhex, json.loads(each))) for rank, each in enumerate(left)}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and the ranks of its script, if it has not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
