"""The options that say on which hosts a mesh runs, checked before anything is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from ..errors import MeshUsageError
from ..wire.options import StartOptions
from .engines import ENGINES, NodeRequest, parse_arguments
from .host_list import INVITING, HostEntry, awaited_hosts, command_for, parse_hosts

# Options that only an engine with nodes of its own takes.
_OF_ENGINES = ("time_limit", "partition", "launch_args", "queue_timeout_s")


@dataclass(frozen=True)
class HostChoice:
    """The hosts of a mesh.

    Attributes:
        num_ranks: of the mesh; not checked where no host says it.
        entries: hosts with their numbers of ranks; () for this host.
        command: the command line that starts the agents of all hosts; "" where each host has one.
    """

    num_ranks: Any
    entries: tuple[HostEntry, ...] = ()
    command: str = ""


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
    is_for_all = "{command}" in launch and "{host}" not in launch and not given.get("hosts")
    if nodes is not None and is_for_all:
        entries = awaited_hosts(launch, nodes, num_ranks, given.get("nproc_per_host"))
        return HostChoice(_sum(entries), entries, launch)
    if nodes is not None or asks_for_nodes:
        raise MeshUsageError(
            "--nodes, --time, --partition, --launch-args and --queue-timeout are for engines with "
            "nodes of their own: add --launch slurm or --launch ray. --nodes is for a command line "
            "without {host}, too, which starts the agents of all hosts"
        )
    entries = _choose_named(given, num_ranks)
    return HostChoice(_sum(entries) if entries else num_ranks, entries)


def _sum(entries: Iterable[HostEntry]) -> int:
    return sum(entry.num_ranks for entry in entries)


def _choose_nodes(given: StartOptions, num_ranks: Any) -> HostChoice:
    """Return the hosts that an engine with nodes of its own is asked for."""
    launch, nodes = given["launch"], given.get("nodes")
    if given.get("hosts"):
        raise MeshUsageError(
            f"--launch {launch} takes its hosts from {launch.title()}: leave --hosts out"
        )
    nodes = ENGINES[launch].default_nodes(os.environ) if nodes is None else nodes
    entries = awaited_hosts(launch, nodes, num_ranks, given.get("nproc_per_host"))
    request = NodeRequest(
        len(entries),
        entries[0].num_ranks,
        given.get("time_limit", ""),
        given.get("partition", ""),
        parse_arguments(given.get("launch_args", "")),
        cast(float | None, given.get("queue_timeout_s")),
        may_use_gpus=given.get("backend") != "gloo",
    )
    command = shlex.join(ENGINES[launch].start(request, os.environ))
    return HostChoice(_sum(entries), entries, command)


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
