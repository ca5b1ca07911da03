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
    """A process that runs scripts in a directory.

    Args:
        where: the directory.
        modules: what else it is to import before it forks ranks.

    Yields:
        What runs a script, and returns what each rank has computed.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("launching.py")), *modules],
            cwd=where,
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def run(job: Job) -> Losses:
            before = log.seek(0, os.SEEK_END)
            print(json.dumps(dataclasses.asdict(job)), file=process.stdin, flush=True)
            readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
            answer = process.stdout.readline() if readable else f"{job.script} has not ended\n"
            log.seek(before)
            assert answer == "\n", f"{answer or 'the launcher ended'}\n{log.read()[-5000:]}"
            return {
                rank: [
                    float.fromhex(number)
                    for number in json.loads((Path(job.folder) / f"{rank}.json").read_text())
                ]
                for rank in range(job.num_ranks)
            }

        try:
            yield run
            process.stdin.close()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
