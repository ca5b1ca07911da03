"""Gets a mesh's own job of Slurm, and cancels it unless the mesh starts: ``python -m
cellmesh.controller.session.launch.slurm_driver JSON``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from ....errors import HostError
from ....wire.descriptors import wait_readable
from .node_holder import hold, say
from .slurm import missing, nodes_of, read_job, run

# How often the queue's state is asked for while a job waits.
_ASK_S = 2.0


def main() -> None:
    """Get the job that the argument describes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        reserve(**json.loads(sys.argv[1]))
    except HostError as error:
        say({"problem": str(error)})


def reserve(command: Sequence[str], timeout_s: float | None) -> None:
    """Run salloc, send the notebook the job and its nodes, and hold them until the mesh has
    started.

    Args:
        command: salloc's; it ends once the job has its nodes.
        timeout_s: how long the nodes may be waited for; None without limit.

    Raises:
        HostError: Slurm refuses the job, or does not start it in time.
    """
    try:
        salloc = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise missing(command[0], error.strerror) from error
    assert salloc.stdout is not None
    output, text, began = salloc.stdout.fileno(), b"", time.monotonic()
    try:
        while True:
            ready = wait_readable([0, output], _ASK_S)
            if 0 in ready:
                sys.exit("the notebook waits no longer")
            if output in ready:
                data = os.read(output, 65536)
                text += data
                if not data:
                    break
            if job := _job_in(text):
                say({"waiting": _describe_queue(job)})
            if timeout_s is not None and time.monotonic() > began + timeout_s:
                raise HostError(
                    f"job {job} was not started by Slurm within {timeout_s:.0f} s "
                    f"({_describe_queue(job)}): it is cancelled; ask for less, or wait longer "
                    "(--queue-timeout)"
                )
        said = text.decode(errors="replace").strip()
        if salloc.wait() != 0:
            raise HostError(f"Slurm refuses the job: {said}")
        if not (job := _job_in(text)):
            raise HostError(
                f"salloc has not named its job ({said}): `squeue --me` shows whether there is one, "
                "and `scancel` ends it"
            )
        nodes = nodes_of(run("squeue", "--noheader", "-j", job, "-o", "%N"))
        say({"job": job, "nodes": nodes})
        hold()
    except BaseException:
        salloc.terminate()  # upon which it revokes what it has asked for
        text += salloc.stdout.read()
        salloc.wait()
        if job := _job_in(text):
            with contextlib.suppress(HostError):
                run("scancel", job)
        raise


def _job_in(text: bytes) -> str:
    return read_job(text.decode(errors="replace"))


def _describe_queue(job: str) -> str:
    with contextlib.suppress(HostError):
        said = run("squeue", "--noheader", "-j", job, "-o", "%T %r").split()
        if said:
            return f"job {job}: {said[0].lower()} ({' '.join(said[1:])})"
    return f"job {job}"


if __name__ == "__main__":
    main()
