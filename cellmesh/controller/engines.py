"""Command lines that start agents on the nodes of Slurm or Ray (an engine). Pure.

One command requests the nodes, starts an agent on each, and frees the nodes at its end. A new
engine is an entry of `ENGINES`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import MeshUsageError


@dataclass(frozen=True)
class NodeRequest:
    """A request to an engine for nodes.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        time_limit: time limit as Slurm takes it, ``2:00:00``; "" for the partition's default.
        partition: partition of Slurm; "" for the cluster's default.
        arguments: further arguments of the engine: options of srun, or Ray resources.
        queue_timeout_s: how long to wait for the nodes, in seconds; None for no limit.
        may_use_gpus: whether ranks get GPUs on nodes that have some.
    """

    nodes: int
    ranks_per_node: int
    time_limit: str = ""
    partition: str = ""
    arguments: tuple[str, ...] = ()
    queue_timeout_s: float | None = None
    may_use_gpus: bool = True


@dataclass(frozen=True)
class Engine:
    """The command lines of an engine, as templates for `command_for`.

    Attributes:
        start: returns the command that starts the agents of a request, given the environment of
            this process.
        again: command that starts an agent on ``{host}``, a node of the job ``{job}``.
        default_nodes: returns the number of nodes if the user gives none, given the environment;
            0 if there is no default.
        queue: command that prints id, state and reason for waiting of the job of ``{mesh}``; () if
            the command of `start` reports the state (`WAITING`).
    """

    start: Callable[[NodeRequest, Mapping[str, str]], list[str]]
    again: list[str]
    default_nodes: Callable[[Mapping[str, str]], int] = lambda environment: 0
    queue: tuple[str, ...] = ()


def _start_by_srun(request: NodeRequest, environment: Mapping[str, str]) -> list[str]:
    """Return srun's command line: a step if this process is in an allocation, else a new job.

    There is one task per node, whose agent starts all ranks of the node, so the task gets the CPUs
    for all of them. Like the mesh, the job outlives the loss of a node or an agent.
    """
    _check_slurm(request)
    patience_s = request.queue_timeout_s
    own = [
        "--job-name={mesh}",
        f"--cpus-per-task={request.ranks_per_node}",
        *([f"--immediate={max(1, round(patience_s))}"] if patience_s is not None else []),
    ]
    return [
        *("srun", f"--nodes={request.nodes}", f"--ntasks={request.nodes}", "--ntasks-per-node=1"),
        *("--mpi=none", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *(["--overlap"] if "SLURM_JOB_ID" in environment else own),
        *([f"--time={request.time_limit}"] if request.time_limit else []),
        *([f"--partition={request.partition}"] if request.partition else []),
        *request.arguments,
        "{command}",
    ]


def _check_slurm(request: NodeRequest) -> None:
    if request.time_limit and not re.fullmatch(r"[0-9]+([-:][0-9]+)*", request.time_limit):
        raise MeshUsageError(
            f"--time {request.time_limit!r} is no time of Slurm's: write it like 2:00:00 or "
            "1-12:00:00"
        )
    if request.partition and not re.fullmatch(r"[\w.,-]+", request.partition):
        raise MeshUsageError(f"--partition {request.partition!r} is no name of a partition")
    if request.arguments and not request.arguments[0].startswith("-"):
        raise MeshUsageError(
            f"--launch-args {shlex.join(request.arguments)!r} are no options of srun's: write "
            "them like '--gres=gpu:4 --account=name'"
        )


def _start_by_ray(request: NodeRequest, environment: Mapping[str, str]) -> list[str]:
    if request.time_limit or request.partition:
        raise MeshUsageError("--time and --partition are Slurm's: leave them out with --launch ray")
    asked = {
        "mesh": "{mesh}",
        "nodes": request.nodes,
        "ranks_per_node": request.ranks_per_node,
        "resources": resources_of(request.arguments),
        "may_use_gpus": request.may_use_gpus,
        "timeout_s": request.queue_timeout_s,
    }
    return [*_RAY, "start", json.dumps(asked), "{command}"]


_RAY = (sys.executable, "-m", "cellmesh.controller.session.launch.ray_driver")

ENGINES = {
    "slurm": Engine(
        _start_by_srun,
        [
            *("srun", "--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1"),
            *("--ntasks-per-node=1", "--mpi=none", "--cpu-bind=none", "--nodelist={host}"),
            "{command}",
        ],
        lambda environment: int(environment.get("SLURM_JOB_NUM_NODES", 1)),
        ("squeue", "--noheader", "--me", "--name={mesh}", "--format=%i %T %r"),
    ),
    "ray": Engine(_start_by_ray, [*_RAY, "again", "{job}", "{host}", "{command}"]),
}


def template_for(launch: str, job: str) -> str:
    """Return the command line that starts an agent on one host of a mesh; "" for ssh.

    Args:
        launch: engine or command line that launched the mesh; "" for ssh.
        job: id of the engine's job in which the mesh was started.

    Raises:
        MeshUsageError: the command line can only start the agents of all hosts together.
    """
    if launch in ENGINES:
        return shlex.join(word.replace("{job}", job) for word in ENGINES[launch].again)
    return launch


def parse_arguments(text: str) -> tuple[str, ...]:
    """Split the text of ``--launch-args``, options for srun or Ray, into words as a shell does.

    Raises:
        MeshUsageError: a quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise MeshUsageError(f"--launch-args {text!r} cannot be read: {error}") from error


def resources_of(arguments: tuple[str, ...]) -> dict[str, float]:
    """Parse Ray resources of a node, such as ``CPU=8 GPU=4 fast_disk=1``.

    Raises:
        MeshUsageError: an argument does not have that form.
    """
    resources = {}
    for word in arguments:
        found = re.fullmatch(r"([A-Za-z_][\w:.-]*)=(\d+(?:\.\d+)?)", word)
        if found is None:
            raise MeshUsageError(
                f"--launch-args {word!r} is no amount of a Ray resource: write what each node "
                "gives like CPU=8 GPU=4"
            )
        resources[found[1]] = float(found[2])
    return resources
