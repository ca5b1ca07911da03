"""Nodes of Slurm for a mesh: those of the allocation that this process is in, or of a new one.

Agents are started by ``srun``, a step for each node, so that Slurm accounts for them and ends them
with the allocation.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping

from ....errors import HostError, MeshUsageError
from ....stdlib import time
from ...node_request import Allocation, NodeRequest
from .node_holder import NodeHolder

_COMMAND_S = 30.0
# A job that ends is COMPLETING, which hides why, until its processes have ended.
_COMPLETING_S = 5.0
_COMPLETING_ASK_S = 0.2
_WHY = {
    "TIMEOUT": "its time limit ({limit}) is over",
    "PREEMPTED": "another job has preempted it",
    "CANCELLED": "it was cancelled (scancel)",
    "NODE_FAIL": "one of its nodes has failed",
    "DEADLINE": "its deadline is over",
    "OUT_OF_MEMORY": "it ran out of memory",
}
_LIVING = ("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "RESIZING")
_GONE_NODE = re.compile(r"DOWN|FAIL|NOT_RESPONDING|POWER|REBOOT|\*")


def allocate(
    request: NodeRequest,
    name: str,
    environment: Mapping[str, str],
    report: Callable[[str], None],
    holder: NodeHolder,
) -> Allocation:
    """Use the allocation of this process, or wait for a new one. Blocks while the job is queued.

    Args:
        request: what was asked for.
        name: the job's, for the queue.
        environment: of this process; in an allocation it has ``SLURM_JOB_ID``.
        report: called with the queue's state while the job waits.
        holder: cancels a new job unless the mesh starts.

    Raises:
        HostError: Slurm is not there, refuses the job, or does not start it in time.
        MeshUsageError: the allocation of this process has fewer nodes.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if job and not request.is_new:
        nodes = nodes_of(environment.get("SLURM_JOB_NODELIST", ""))
        wanted = request.nodes or len(nodes)
        if wanted > len(nodes):
            raise MeshUsageError(
                f"--nodes {wanted}: this allocation (job {job}) has {len(nodes)} nodes "
                f"({', '.join(nodes)}); with --time or --partition a new one is asked for"
            )
        return allocation_of(job, nodes[:wanted], is_own=False)
    driver = (sys.executable, "-m", "cellmesh.controller.session.launch.slurm_driver")
    asked = {"command": salloc_command(request, name), "timeout_s": request.queue_timeout_s}
    given = holder.ask(driver, asked, report)
    return allocation_of(given["job"], tuple(given["nodes"]), is_own=True)


def salloc_command(request: NodeRequest, name: str) -> list[str]:
    """Return the command line that asks for nodes and returns once they are given.

    The allocation outlives the failure of a node, as the mesh does.
    """
    return [
        "salloc",
        f"--job-name={name}",
        f"--nodes={request.nodes or 1}",
        f"--ntasks-per-node={request.ranks_per_node or request.num_ranks}",
        *([f"--time={request.time_limit}"] if request.time_limit else []),
        *([f"--partition={request.partition}"] if request.partition else []),
        *request.arguments,
        "--no-kill",
        "--no-shell",
    ]


def allocation_of(job: str, nodes: tuple[str, ...], is_own: bool) -> Allocation:
    """Describe how agents are started on the nodes of a job, and how they give the job back.

    Args:
        is_own: the job was made for the mesh, and is given back when the mesh ends.
    """
    template = (
        f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none "
        "--nodelist={host} {command}"
    )
    if not is_own:
        return Allocation(nodes, template, slurm_job=job)
    leave = (sys.executable, "-m", "cellmesh.workers.agent.slurm_job", job)
    return Allocation(nodes, template, ("scancel", job), leave, job)


def why_lost(job: str, node: str) -> str:
    """Ask Slurm why the agent on a node has gone; "" if Slurm knows of no reason. Blocks."""
    deadline = time.monotonic() + _COMPLETING_S
    with contextlib.suppress(HostError):
        while True:
            text = run("scontrol", "show", "job", "--oneliner", job)
            if _field(text, "JobState") != "COMPLETING" or time.monotonic() > deadline:
                break
            time.sleep(_COMPLETING_ASK_S)
        return explain_loss(text, run("scontrol", "show", "node", "--oneliner", node), node)
    return ""


def explain_loss(job_text: str, node_text: str, node: str) -> str:
    """Explain why an agent has gone by what ``scontrol show job`` and ``show node`` print; "" if
    both live.
    """
    state, job = _field(job_text, "JobState"), _field(job_text, "JobId")
    if state and state not in _LIVING:
        why = _WHY.get(state, f"{state}, {_field(job_text, 'Reason')}")
        return f"Slurm has ended job {job}: {why.format(limit=_field(job_text, 'TimeLimit'))}"
    state = _field(node_text, "State")
    if _GONE_NODE.search(state) or not _is_among(node, _field(job_text, "NodeList")):
        reason = re.search(r"Reason=(.*?)(?: \[|$)", node_text)
        said = f": {reason[1]}" if reason else ""
        return f"Slurm has taken node {node} from job {job} (it is {state}{said})"
    return ""


def _is_among(node: str, node_list: str) -> bool:
    if not node_list or node_list == "(null)":
        return True
    try:
        return node in nodes_of(node_list)
    except HostError:
        return True


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", text)
    return found[1] if found else ""


def read_job(text: str) -> str:
    """Return the id of the job that salloc's messages name; "" if they name none yet."""
    found = re.search(r"job allocation (\d+)|job (\d+) queued", text)
    return (found[1] or found[2]) if found else ""


def nodes_of(node_list: str) -> tuple[str, ...]:
    """Return the names in a list of nodes like ``n[1-2]``."""
    return tuple(run("scontrol", "show", "hostnames", node_list.strip()).split())


def run(*command: str) -> str:
    """Return what a command of Slurm's prints.

    Raises:
        HostError: it is not there, or has failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except OSError as error:
        raise missing(command[0], error.strerror) from error
    except subprocess.TimeoutExpired:
        raise HostError(f"{command[0]} does not answer: is slurmctld up? `scontrol ping`") from None
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def missing(program: str, why: str | None) -> HostError:
    """Return the error for a host without a command of Slurm's."""
    return HostError(
        f"--launch slurm: cannot run {program} ({why}): it needs Slurm's commands on this host's "
        "path"
    )
