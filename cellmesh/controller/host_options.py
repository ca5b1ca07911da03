"""The options that say on which hosts a mesh runs, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from ..errors import MeshUsageError
from ..wire.options import StartOptions
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
        request: what Slurm or Ray is asked for; None without.
    """

    num_ranks: Any
    entries: tuple[HostEntry, ...] = ()
    request: NodeRequest | None = None


def choose_hosts(given: StartOptions, num_ranks: Any) -> HostChoice:
    """Check what a user has said of the hosts, and return the hosts.

    Args:
        given: by the user, simple values checked.
        num_ranks: likewise; None if the hosts say it.

    Raises:
        MeshUsageError: something in it cannot be.
    """
    launch, nodes = given.get("launch", ""), given.get("nodes")
    asks_for_nodes = any(given.get(name, "") not in ("", None) for name in _OF_ENGINES)
    if launch in ENGINES:
        return _choose_nodes(given, num_ranks)
    if launch in INVITING:
        if given.get("hosts") or asks_for_nodes:
            raise MeshUsageError(
                f"--launch {launch} takes --nodes and --nproc-per-host only: the hosts announce "
                "themselves"
            )
        entries = awaited_hosts(launch, nodes, num_ranks, given.get("nproc_per_host"))
        return HostChoice(_sum(entries), entries)
    if nodes is not None or asks_for_nodes:
        raise MeshUsageError(
            "--nodes, --time, --partition, --launch-args and --queue-timeout are for engines with "
            "nodes of their own: add --launch slurm or --launch ray"
        )
    entries = _choose_named(given, num_ranks)
    return HostChoice(_sum(entries) if entries else num_ranks, entries)


def _sum(entries: Iterable[HostEntry]) -> int:
    return sum(entry.num_ranks for entry in entries)


def _choose_nodes(given: StartOptions, num_ranks: Any) -> HostChoice:
    """Return what an engine with nodes of its own is asked for."""
    launch, nodes, nproc_per_host = given["launch"], given.get("nodes"), given.get("nproc_per_host")
    if given.get("hosts"):
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
    return HostChoice(num_ranks or nproc_per_host, request=request)


def _choose_named(given: StartOptions, num_ranks: Any) -> tuple[HostEntry, ...]:
    """Return the hosts that the user has named."""
    hosts, launch = given.get("hosts", ()), given.get("launch", "")
    if not isinstance(hosts, str | list | tuple):
        raise MeshUsageError(
            f"hosts must be text like a:4,b:4 or a list of such texts, not {hosts!r}"
        )
    if not hosts:
        if launch or "nproc_per_host" in given:
            raise MeshUsageError("say on which hosts, like --hosts a:4,b:4")
        return ()
    if num_ranks is not None and (isinstance(num_ranks, bool) or not isinstance(num_ranks, int)):
        raise MeshUsageError(f"the number of ranks must be a whole number, not {num_ranks!r}")
    entries = parse_hosts(hosts, num_ranks, given.get("nproc_per_host"))
    command_for(launch, entries[0].name, [])
    return entries
