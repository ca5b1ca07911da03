"""Nodes of Slurm for a mesh: those of the allocation that this process is in, or of a new one.

Agents are started by ``srun``, a step for each node, so that Slurm accounts for them and ends them
with the allocation.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....errors import HostError, MeshUsageError
from ...host_list import HostEntry, SlurmRequest, parse_hosts

# How often the queue's state is asked for while a job waits.
_ASK_S = 2.0
_COMMAND_S = 30.0


@dataclass(frozen=True)
class Allocation:
    """Nodes that Slurm has given.

    Attributes:
        job: the job's id.
        nodes: their names.
        is_own: the allocation was made for the mesh, and is given back when the mesh ends.
    """

    job: str
    nodes: tuple[str, ...]
    is_own: bool

    @property
    def template(self) -> str:
        """The command line that starts an agent on a node, as `command_for` reads it."""
        return (
            f"srun --jobid={self.job} --overlap --nodes=1 --ntasks=1 --cpu-bind=none "
            "--nodelist={host} {command}"
        )

    @property
    def release_command(self) -> tuple[str, ...]:
        """What gives the allocation back; () for one that is not the mesh's own."""
        return ("scancel", self.job) if self.is_own else ()


def allocate(
    request: SlurmRequest,
    name: str,
    environment: Mapping[str, str],
    report: Callable[[str], None],
    timeout_s: float,
) -> Allocation:
    """Use the allocation of this process, or wait for a new one. Blocks while the job is queued.

    Args:
        request: what was asked for.
        name: the job's, for the queue.
        environment: of this process; in an allocation it has ``SLURM_JOB_ID``.
        report: called with the queue's state while the job waits.
        timeout_s: how long the job may be queued.

    Raises:
        HostError: Slurm is not there, refuses the job, or does not start it in time.
        MeshUsageError: the allocation of this process has fewer nodes.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if job and not request.is_new:
        nodes = _nodes_of(environment.get("SLURM_JOB_NODELIST", ""))
        wanted = request.nodes or len(nodes)
        if wanted > len(nodes):
            raise MeshUsageError(
                f"--nodes {wanted}: this allocation (job {job}) has {len(nodes)} nodes "
                f"({', '.join(nodes)}); with --time or --partition a new one is asked for"
            )
        return Allocation(job, nodes[:wanted], is_own=False)
    job = _submit(salloc_command(request, name), report, timeout_s)
    return Allocation(job, _nodes_of(_run("squeue", "--noheader", "-j", job, "-o", "%N")), True)


def salloc_command(request: SlurmRequest, name: str) -> list[str]:
    """Return the command line that asks for nodes and returns once they are given."""
    return [
        "salloc",
        "--no-shell",
        f"--job-name={name}",
        f"--nodes={request.nodes or 1}",
        *([f"--time={request.time_limit}"] if request.time_limit else []),
        *([f"--partition={request.partition}"] if request.partition else []),
    ]


def entries_of(
    allocation: Allocation, num_ranks: int | None, nproc_per_host: int | None
) -> tuple[HostEntry, ...]:
    """Return the allocation's nodes with their numbers of ranks.

    Raises:
        MeshUsageError: nothing says how many ranks a node has.
    """
    return parse_hosts(list(allocation.nodes), num_ranks, nproc_per_host)


def describe_state(job: str) -> str:
    """Describe a job's state as Slurm does: ``TIMEOUT``, ``PREEMPTED``; "" if it is unknown."""
    try:
        text = _run("scontrol", "show", "job", "--oneliner", job)
    except HostError:
        return ""
    found = re.search(r"JobState=(\S+)", text)
    return found[1] if found else ""


def read_job(text: str) -> str:
    """Return the id of the job that salloc's messages name; "" if they name none yet."""
    found = re.search(r"job allocation (\d+)|job (\d+) queued", text)
    return (found[1] or found[2]) if found else ""


def _submit(command: list[str], report: Callable[[str], None], timeout_s: float) -> str:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise _missing(command[0], error) from error
    assert process.stdout is not None
    text, deadline = "", time.monotonic() + timeout_s
    try:
        with process.stdout as output, selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                if selector.select(_ASK_S):
                    data = os.read(output.fileno(), 65536)
                    text += data.decode(errors="replace")
                    if not data:
                        break
                if job := read_job(text):
                    report(_describe_queue(job))
                if time.monotonic() > deadline:
                    raise HostError(
                        f"job {job} was not started by Slurm within {timeout_s:.0f} s "
                        f"({_describe_queue(job)}): it is cancelled; ask for less, or wait longer "
                        "(timeout_s)"
                    )
        if process.wait() != 0 or not job:
            raise HostError(f"Slurm refuses the job: {text.strip()}")
        return job
    except BaseException:
        process.terminate()  # upon which salloc revokes what it has asked for
        process.wait()
        if job := read_job(text):
            with contextlib.suppress(HostError):
                _run("scancel", job)
        raise


def _describe_queue(job: str) -> str:
    with contextlib.suppress(HostError):
        said = _run("squeue", "--noheader", "-j", job, "-o", "%T %r").split()
        if said:
            return f"job {job}: {said[0].lower()} ({' '.join(said[1:])})"
    return f"job {job}"


def _nodes_of(node_list: str) -> tuple[str, ...]:
    return tuple(_run("scontrol", "show", "hostnames", node_list.strip()).split())


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except OSError as error:
        raise _missing(command[0], error) from error
    except subprocess.TimeoutExpired:
        raise HostError(f"{command[0]} does not answer: is slurmctld up? `scontrol ping`") from None
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _missing(program: str, error: OSError) -> HostError:
    return HostError(
        f"--launch slurm: cannot run {program} ({error.strerror}): it needs Slurm's commands on "
        "this host's path"
    )
