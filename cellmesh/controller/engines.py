"""The engines that have hosts of their own, Slurm and Ray, by the command lines that start agents
there. Pure.

One command asks for the hosts, starts an agent on each, and gives the hosts back when it ends. A
new engine is an entry of `ENGINES`.
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
    """The nodes that an engine is asked for.

    Attributes:
        nodes: how many.
        ranks_per_node: of each node.
        time_limit: as Slurm takes it, ``2:00:00``; "" for the partition's.
        partition: of Slurm; "" for the cluster's default.
        arguments: further ones, as the engine takes them.
        queue_timeout_s: how long nodes may be waited for; None without limit.
        may_use_gpus: whether ranks get GPUs where nodes have some.
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
    """An engine's command lines: templates, as `command_for` reads them.

    Attributes:
        start: returns the command that starts the agents of a request, given the environment of
            this process.
        again: the command that starts an agent on ``{host}``, a node of the job ``{job}``.
        default_nodes: returns the number of nodes, given the environment, where the user has said
            none; 0 if there is no such number.
        queue: the command that prints the id and the state of the job of ``{mesh}``, and the reason
            for which it waits; () where the first command reports it (`WAITING`).
    """

    start: Callable[[NodeRequest, Mapping[str, str]], list[str]]
    again: list[str]
    default_nodes: Callable[[Mapping[str, str]], int] = lambda environment: 0
    queue: tuple[str, ...] = ()


def _start_by_srun(request: NodeRequest, environment: Mapping[str, str]) -> list[str]:
    """Return srun's command line: in an allocation a step of it, else with a job of its own.

    One task a node starts all ranks of the node, so its CPUs are those of all of them. The job
    outlives the loss of a node and of an agent, as the mesh does.
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
        launch: the mesh's; "" for ssh.
        job: of the engine that has started the mesh's first agents.

    Raises:
        MeshUsageError: the command line starts the agents of all hosts, and cannot of one.
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
    """Read Ray resources of a node, such as ``CPU=8 GPU=4 fast_disk=1``.

    Raises:
        MeshUsageError: they are not of that form.
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
