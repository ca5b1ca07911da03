"""Command lines that start agents on the nodes of Slurm or Ray (an engine).

One command requests the nodes, starts an agent on each, and frees the nodes at its end. A new
engine is an entry of `ENGINES`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..errors import MeshUsageError


class Engine(msgspec.Struct, frozen=True):
    """The command lines of an engine, as templates for `command_for`.

    Attributes:
        start: returns the command that requests nodes and starts an agent on each, given the number
            of nodes, the number of ranks on each, and the words of ``--launch-args``.
        again: command that starts an agent on ``{host}``, a node of the job ``{job}``.
        default_nodes: returns the number of nodes if the user gives none, given the environment of
            this process; None if there is no default.
        queue: command that prints id, state and reason for waiting of the job of ``{mesh}``; () if
            the command of `start` reports the state (`WAITING`).
    """

    start: Callable[[int, int, Sequence[str]], list[str]]
    again: list[str]
    default_nodes: Callable[[Mapping[str, str]], int | None] = lambda environment: None
    queue: tuple[str, ...] = ()


def _start_by_srun(nodes: int, ranks_per_node: int, arguments: Sequence[str]) -> list[str]:
    """Return srun's command line: a step if this process is in an allocation, else a new job.

    There is one task per node, whose agent starts all ranks of the node, so the task gets the CPUs
    for all of them. Like the mesh, the job outlives the loss of a node or an agent.
    """
    if arguments and not arguments[0].startswith("-"):
        raise MeshUsageError(
            f"--launch-args {shlex.join(arguments)!r} are no options of srun's: write them like "
            "'--time=2:00:00 --gres=gpu:4'"
        )
    own = ["--job-name={mesh}", f"--cpus-per-task={ranks_per_node}"]
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--mpi=none", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *(["--overlap"] if "SLURM_JOB_ID" in os.environ else own),
        *arguments,
        "{command}",
    ]


def _start_by_ray(nodes: int, ranks_per_node: int, arguments: Sequence[str]) -> list[str]:
    asked = {
        "mesh": "{mesh}",
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "resources": resources_of(arguments),
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


def resources_of(arguments: Sequence[str]) -> dict[str, float]:
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
