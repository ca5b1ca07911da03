"""The options of %dist_start, declared with click."""

from __future__ import annotations

import click

from ..controller.options import BACKENDS
from .completion import meanings
from .completion.meanings import Text

_MESH: tuple[click.Parameter, ...] = (
    click.Argument(["num_ranks"], type=int, required=False),
    click.Option(["--mesh"], metavar="DIMS", help="Dims of the DeviceMesh, like dp=2,tp=4."),
    click.Option(
        ["--backend"],
        type=Text(meanings.words(*BACKENDS)),
        metavar="NAME",
        help="auto, gloo or nccl.",
    ),
    click.Option(["--preload"], metavar="MODULES", help="Import these once for all ranks: a,b,c."),
    click.Option(["--name"], help="A name for `cellmesh ps` and %dist_attach."),
    click.Option(
        ["--settle", "settle_s"],
        type=float,
        metavar="SECONDS",
        help="After a rank fails, how long the others may take before they are released (1).",
    ),
    click.Option(
        ["--on-error"],
        type=click.Choice(["release", "wait"]),
        help="What then happens: release them, or wait for the stop button.",
    ),
    click.Option(
        ["--fresh"],
        is_flag=True,
        default=None,
        help="End a mesh of this notebook that runs, and start a new one.",
    ),
)

# On which hosts; what starts an agent there.
_HOSTS = (
    click.Option(
        ["--hosts"],
        metavar="HOSTS",
        help="Run on these hosts, by ssh: a:4,b:4. Ranks are numbered host by host.",
    ),
    click.Option(
        ["--nproc-per-host"],
        type=int,
        metavar="N",
        help="Ranks on each host that names no number.",
    ),
    click.Option(
        ["--launch"],
        metavar="COMMAND",
        help="What starts an agent on a host, in place of ssh: slurm, ray, torchrun, hand "
        "(you do), or 'docker exec -i {host} {command}'.",
    ),
)

# What is asked of engines that have nodes of their own.
_NODES = (
    click.Option(
        ["--nodes"],
        type=int,
        metavar="N",
        help="Nodes to ask Slurm or Ray for, or hosts that announce themselves.",
    ),
    click.Option(["--time", "time_limit"], metavar="TIME", help="Of Slurm's allocation: 2:00:00."),
    click.Option(["--partition"], metavar="NAME", help="Slurm's partition."),
    click.Option(
        ["--launch-args"],
        metavar="ARGUMENTS",
        help="Further options of salloc, in quotes, like '--gres=gpu:4 --account=x'; of "
        "Ray what each node gives: 'CPU=8 GPU=4'.",
    ),
    click.Option(
        ["--queue-timeout", "queue_timeout_s"],
        metavar="TIME",
        help="How long to wait for nodes of Slurm or Ray: 10m (no limit).",
    ),
)

# What the ranks of all hosts have, and for how long.
_RANKS = (
    click.Option(
        ["--spares"],
        type=int,
        metavar="N",
        help="Keep the last N of the hosts for %dist_heal --replace.",
    ),
    click.Option(
        ["--host-lease", "host_lease_s"],
        metavar="TIME",
        help="How long a host may be without a connection before its ranks count as lost (10s).",
    ),
    click.Option(
        ["--interface"],
        metavar="NAME",
        help="The hosts' network interface, for the wire, gloo, NCCL and the store.",
    ),
    click.Option(
        ["--env"],
        multiple=True,
        metavar="NAME",
        help="Pass on this environment variable to the ranks of all hosts, or NAME=value.",
    ),
    click.Option(
        ["--gpus"],
        metavar="LIST",
        help="GPUs that the ranks of each host use: 0,2, or by host a=0,1;b=2, or none.",
    ),
    click.Option(
        ["--address"],
        metavar="ADDRESS",
        help="This host's address or interface, for hosts that announce themselves.",
    ),
    click.Option(
        ["--sync"],
        type=click.Choice(["on", "off"]),
        help="Bring the modules beside the notebook to other hosts as they are here (on).",
    ),
    click.Option(
        ["--lease", "lease_s"],
        metavar="TIME",
        help="How long the ranks outlive their notebook, one that is shut down, too: 30m, 2h, 0.",
    ),
    click.Option(
        ["--auto-heal"],
        is_flag=True,
        default=None,
        help="Replace ranks that die by themselves.",
    ),
    click.Option(
        ["--fold-numbers"],
        type=click.Choice(["on", "off"]),
        help="Show lines of ranks that differ only in numbers as one (on).",
    ),
)

START_OPTIONS = (*_MESH, *_HOSTS, *_NODES, *_RANKS)
