"""The options that say on which hosts a mesh runs, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import MeshUsageError
from ..wire.options import StartOptions
from .environment import check_gpu_hosts, read_gpus
from .host_list import INVITING, HostEntry, awaited_hosts, command_for, parse_hosts
from .node_request import ENGINES, NodeRequest, check_request, parse_arguments

# Options that only an engine with nodes of its own takes.
_OF_ENGINES = ("time_limit", "partition", "launch_args", "queue_timeout_s")


@dataclass(frozen=True)
class HostChoice:
    """The hosts of a mesh, as far as they are known before an engine is asked.

    Attributes:
        num_ranks: of the mesh; not checked where no host says it.
        entries: hosts with their numbers of ranks; () for this host, or those of a `request`.
        spares: hosts that may take the place of lost ones.
        request: what Slurm or Ray is asked for; None without.
        gpus: which GPUs the ranks use, by host, "" for every host; empty for all GPUs.
    """

    num_ranks: Any
    entries: tuple[HostEntry, ...] = ()
    spares: tuple[str, ...] = ()
    request: NodeRequest | None = None
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def choose_hosts(given: StartOptions, num_ranks: Any) -> HostChoice:
    """Check what a user has said of the hosts, and return the hosts.

    Args:
        given: by the user, simple values checked.
        num_ranks: likewise; None if the hosts say it.

    Raises:
        MeshUsageError: something in it cannot be.
    """
    launch, nodes = given.get("launch", ""), given.get("nodes")
    gpus = read_gpus(given["gpus"]) if "gpus" in given else {}
    asks_for_nodes = any(given.get(name, "") not in ("", None) for name in _OF_ENGINES)
    if launch in ENGINES:
        return _choose_nodes(given, num_ranks, gpus)
    if launch in INVITING:
        if given.get("hosts") or given.get("spares") or asks_for_nodes:
            raise MeshUsageError(
                f"--launch {launch} takes --nodes and --nproc-per-host only: the hosts announce "
                "themselves"
            )
        entries = awaited_hosts(launch, nodes, num_ranks, given.get("nproc_per_host"))
        return HostChoice(_sum(entries), entries, gpus=gpus)
    if nodes is not None or asks_for_nodes:
        raise MeshUsageError(
            "--nodes, --time, --partition, --launch-args and --queue-timeout are for engines with "
            "nodes of their own: add --launch slurm or --launch ray"
        )
    entries, spares = _choose_named(given, num_ranks)
    check_gpu_hosts(gpus, {*spares, *(entry.name for entry in entries)})
    return HostChoice(_sum(entries) if entries else num_ranks, entries, spares, gpus=gpus)


def _sum(entries: Iterable[HostEntry]) -> int:
    return sum(entry.num_ranks for entry in entries)


def _choose_nodes(
    given: StartOptions, num_ranks: Any, gpus: Mapping[str, tuple[str, ...]]
) -> HostChoice:
    """Return what an engine with nodes of its own is asked for."""
    launch, nodes, nproc_per_host = given["launch"], given.get("nodes"), given.get("nproc_per_host")
    if given.get("hosts") or given.get("spares"):
        raise MeshUsageError(
            f"--launch {launch} takes its hosts from {launch.title()}: leave --hosts out"
        )
    if num_ranks is None and nodes and nproc_per_host:
        num_ranks = nodes * nproc_per_host
    request = check_request(
        NodeRequest(
            launch,
            nodes,
            num_ranks,
            nproc_per_host,
            given.get("time_limit", ""),
            given.get("partition", ""),
            parse_arguments(given.get("launch_args", "")),
            cast(float | None, given.get("queue_timeout_s")),
            may_use_gpus=given.get("backend") != "gloo",
        )
    )
    # Of one node, until the nodes are known.
    return HostChoice(num_ranks or nproc_per_host, request=request, gpus=gpus)


def _choose_named(
    given: StartOptions, num_ranks: Any
) -> tuple[tuple[HostEntry, ...], tuple[str, ...]]:
    """Return the hosts that the user has named: those with ranks, and the spares."""
    hosts, spares = given.get("hosts", ()), given.get("spares", 0)
    if not isinstance(hosts, str | list | tuple):
        raise MeshUsageError(
            f"hosts must be text like a:4,b:4 or a list of such texts, not {hosts!r}"
        )
    launch, nproc_per_host = given.get("launch", ""), given.get("nproc_per_host")
    if not hosts:
        if launch or spares or nproc_per_host is not None:
            raise MeshUsageError("say on which hosts, like --hosts a:4,b:4")
        return (), ()
    if num_ranks is not None and (isinstance(num_ranks, bool) or not isinstance(num_ranks, int)):
        raise MeshUsageError(f"the number of ranks must be a whole number, not {num_ranks!r}")
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    if not 0 <= spares < len(names):
        raise MeshUsageError(
            f"--spares must be fewer than the {len(names)} hosts, not {spares!r}: they are the "
            "last of --hosts, without ranks"
        )
    used = len(names) - spares
    kept = tuple(str(name).strip().partition(":")[0] for name in names[used:])
    entries = parse_hosts(names[:used], num_ranks, nproc_per_host)
    command_for(launch, entries[0].name, [])
    return entries, kept
