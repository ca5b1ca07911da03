"""What an engine that has nodes of its own, Slurm or Ray, is asked for, and what it has given.
Pure.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from ..errors import MeshUsageError

ENGINES = ("slurm", "ray")


@dataclass(frozen=True)
class NodeRequest:
    """What an engine is asked for.

    Attributes:
        engine: ``slurm`` or ``ray``.
        nodes: how many; None for all of this process's Slurm allocation, or one.
        num_ranks: of all nodes; None if `nproc_per_host` says how many.
        nproc_per_host: of each node.
        time_limit: as salloc takes it, ``2:00:00``; "" for the partition's.
        partition: of Slurm; "" for the cluster's default.
        arguments: further ones, as the engine takes them.
        queue_timeout_s: how long nodes may be waited for; None without limit.
        may_use_gpus: whether ranks get GPUs where nodes have some.
    """

    engine: str
    nodes: int | None = None
    num_ranks: int | None = None
    nproc_per_host: int | None = None
    time_limit: str = ""
    partition: str = ""
    arguments: tuple[str, ...] = ()
    queue_timeout_s: float | None = None
    may_use_gpus: bool = True

    @property
    def is_new(self) -> bool:
        """Whether a new allocation is asked for, also within another."""
        return bool(self.time_limit or self.partition or self.arguments)

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks a node has; None if the number of nodes is not known yet."""
        if self.nproc_per_host is not None:
            return self.nproc_per_host
        return (self.num_ranks or 0) // self.nodes if self.nodes else None


@dataclass(frozen=True)
class Allocation:
    """Nodes that an engine has given.

    Attributes:
        nodes: their names; what ``{host}`` in `template` stands for.
        template: the command line that starts an agent on a node, as `command_for` reads it.
        release_command: gives the nodes back; () for nodes that are not the mesh's own.
        leave_command: run on each node when its agent has ended; gives the nodes back when no other
            agent of the mesh lives. () if nothing is to be run.
        slurm_job: the job's id; "" without Slurm.
    """

    nodes: tuple[str, ...]
    template: str
    release_command: tuple[str, ...] = ()
    leave_command: tuple[str, ...] = ()
    slurm_job: str = ""


def check_request(request: NodeRequest) -> NodeRequest:
    """Check what can be checked before an engine is asked.

    Raises:
        MeshUsageError: a number or text cannot be.
    """
    nodes, is_slurm = request.nodes, request.engine == "slurm"
    if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1):
        raise MeshUsageError(f"--nodes must be at least 1, not {nodes!r}")
    if nodes is None and not is_slurm:
        raise MeshUsageError("on how many nodes of the Ray cluster? Say --nodes 2")
    if not is_slurm and (request.time_limit or request.partition):
        raise MeshUsageError("--time and --partition are Slurm's: leave them out with --launch ray")
    if request.time_limit and not re.fullmatch(r"[0-9]+([-:][0-9]+)*", request.time_limit):
        raise MeshUsageError(
            f"--time {request.time_limit!r} is no time of Slurm's: write it like 2:00:00 or "
            "1-12:00:00"
        )
    if request.partition and not re.fullmatch(r"[\w.,-]+", request.partition):
        raise MeshUsageError(f"--partition {request.partition!r} is no name of a partition")
    if is_slurm and request.arguments and not request.arguments[0].startswith("-"):
        raise MeshUsageError(
            f"--launch-args {shlex.join(request.arguments)!r} are no options of salloc's: write "
            "them like '--gres=gpu:4 --account=name'"
        )
    if quiet := {"-Q", "--quiet"}.intersection(request.arguments if is_slurm else ()):
        raise MeshUsageError(
            f"--launch-args {quiet.pop()}: leave it out, as salloc then does not name its job, "
            "which nobody could cancel"
        )
    if not is_slurm:
        resources_of(request.arguments)
    if request.num_ranks is None and request.nproc_per_host is None:
        raise MeshUsageError("how many ranks run on a node? Say --nproc-per-host 4")
    if nodes and request.nproc_per_host is None and (request.num_ranks or 0) % nodes:
        raise MeshUsageError(
            f"{request.num_ranks} ranks cannot be divided equally among {nodes} nodes"
        )
    return request


def parse_arguments(text: str) -> tuple[str, ...]:
    """Split the text of ``--launch-args``, options for salloc or Ray, into words as a shell does.

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
