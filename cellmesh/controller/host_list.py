"""Parses and checks the options for the hosts of a mesh: their names, their numbers of ranks, and
the command line that starts an agent on each.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

from ..errors import MeshUsageError
from ..wire.hosts import Host
from ..wire.options import StartOptions
from .engines import ENGINES, parse_arguments

# OpenSSH's client with the user's configuration; it asks for nothing, as there is no terminal.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host} {command}"
# Values of --launch with which hosts announce themselves: this process starts nothing on them.
INVITING = ("hand", "torchrun")


def awaited_hosts(
    launch: str, nodes: int | None, num_ranks: int | None, nproc_per_host: int | None
) -> tuple[Host, ...]:
    """Return hosts without names, for launches in which hosts announce their names themselves or
    one command requests all hosts.

    Args:
        launch: one of `INVITING`, or the name or the command line of an engine.
        nodes: number of hosts.
        num_ranks: number of ranks on all hosts.
        nproc_per_host: number of ranks on each host.

    Raises:
        MeshUsageError: a number is missing or not possible.
    """
    if nodes is None or isinstance(nodes, bool) or nodes < 1:
        raise MeshUsageError(
            f"on how many hosts does --launch {launch!r} run agents? Say it, like --nodes 2, not "
            f"{nodes}"
        )
    names = [f"host{number}" for number in range(nodes)]
    entries = parse_hosts(names, num_ranks, nproc_per_host)
    return tuple(Host("", num_ranks=entry.num_ranks) for entry in entries)


def parse_hosts(
    hosts: str | Sequence[str], num_ranks: int | None = None, nproc_per_host: int | None = None
) -> tuple[Host, ...]:
    """Parse hosts and their numbers of ranks.

    Args:
        hosts: ``a:4,b:4``, or ``a,b`` if another argument determines the numbers.
        num_ranks: number of ranks on all hosts; hosts without a number get equal shares of the
            rest.
        nproc_per_host: number of ranks on each host without a number.

    Raises:
        MeshUsageError: a host cannot be parsed or is named twice, or the numbers do not add up to
            `num_ranks`.
    """
    words = hosts.split(",") if isinstance(hosts, str) else [str(host) for host in hosts]
    words = [word.strip() for word in words if word.strip()]
    if not words:
        raise MeshUsageError("--hosts names no host: write them like a:4,b:4")
    if nproc_per_host is not None and nproc_per_host < 1:
        raise MeshUsageError(f"--nproc-per-host must be at least 1, not {nproc_per_host}")
    named: dict[str, int | None] = {}
    for word in words:
        found = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(\d+))?", word)
        if found is None or (found[2] is not None and int(found[2]) < 1):
            raise MeshUsageError(f"{word!r} is no host with a number of ranks: write it like a:4")
        if found[1] in named:
            raise MeshUsageError(f"--hosts names {found[1]!r} twice: say its ranks in one number")
        named[found[1]] = int(found[2]) if found[2] is not None else nproc_per_host
    open_hosts = [name for name, number in named.items() if number is None]
    if open_hosts:
        left = (num_ranks or 0) - sum(number or 0 for number in named.values())
        if left <= 0 or left % len(open_hosts):
            how = (
                f"{num_ranks} ranks cannot be divided equally among them"
                if num_ranks is not None
                else "nothing says so"
            )
            raise MeshUsageError(
                f"how many ranks run on {', '.join(open_hosts)}? {how}: write {open_hosts[0]}:4, "
                "or use --nproc-per-host 4"
            )
        named.update(dict.fromkeys(open_hosts, left // len(open_hosts)))
    entries = tuple(Host(name, num_ranks=number or 0) for name, number in named.items())
    total = sum(entry.num_ranks for entry in entries)
    if num_ranks is not None and total != num_ranks:
        raise MeshUsageError(f"the hosts have {total} ranks in all, and the mesh {num_ranks}")
    return entries


def command_for(template: str, host: str, command: Sequence[str], mesh: str = "") -> list[str]:
    """Return the command line that starts the agent of a host, or the agents of all hosts.

    Args:
        template: such as ``kubectl exec -i {host} -- {command}``; "" for ssh. ``{command}`` as a
            word of its own is replaced by all words of the command, else by the command as a text
            for a shell.
        host: replaces ``{host}``: name of the host.
        command: the agent's command, to be run on the host.
        mesh: replaces ``{mesh}``: name of the mesh.

    Raises:
        MeshUsageError: the template is not a command line, or has no ``{command}``.
    """
    try:
        words = shlex.split(template or SSH)
    except ValueError as error:
        raise MeshUsageError(f"--launch {template!r} is no command line: {error}") from error
    if not any("{command}" in word for word in words):
        raise MeshUsageError(
            f"--launch {template!r} lacks {{command}}: write it like `docker exec -i {{host}} "
            "{command}`"
        )
    text = shlex.join(command)
    argv: list[str] = []
    for word in words:
        if word == "{command}" and template:
            argv += command
        else:
            word = word.replace("{host}", host).replace("{mesh}", mesh)
            argv.append(word.replace("{command}", text))
    return argv


def choose_hosts(given: StartOptions, num_ranks: Any) -> tuple[tuple[Host, ...], str]:
    """Check the user's options for the hosts of a mesh.

    Args:
        given: options that the user has given, with simple values checked already.
        num_ranks: number of ranks that the user has given; None if the hosts determine it.

    Returns:
        The hosts with their numbers of ranks, () for this host only; and the command line that
        starts the agents of all hosts, "" if each host has its own.

    Raises:
        MeshUsageError: the options are invalid or exclude each other.
    """
    launch, nodes = given.get("launch", ""), given.get("nodes")
    is_engine, is_inviting = launch in ENGINES, launch in INVITING
    arguments = parse_arguments(given.get("launch_args", ""))
    if given.get("hosts") and (is_engine or is_inviting):
        raise MeshUsageError(
            f"--launch {launch} has hosts of its own: leave --hosts out, and say --nodes and "
            "--nproc-per-host"
        )
    if arguments and not is_engine:
        raise MeshUsageError(
            "--launch-args are for engines with nodes of their own: add --launch slurm or --launch "
            "ray"
        )
    if is_engine and nodes is None:
        nodes = ENGINES[launch].default_nodes(os.environ)
    is_for_all = "{command}" in launch and "{host}" not in launch and not given.get("hosts")
    if is_engine or is_inviting or (is_for_all and nodes is not None):
        entries = awaited_hosts(launch, nodes, num_ranks, given.get("nproc_per_host"))
        if is_engine:
            launch = shlex.join(
                ENGINES[launch].start(len(entries), entries[0].num_ranks, arguments)
            )
        return entries, "" if is_inviting else launch
    if nodes is not None:
        raise MeshUsageError(
            "--nodes is for --launch slurm, ray, hand or torchrun, and for a command line without "
            "{host}, which starts the agents of all hosts"
        )
    if given.get("address"):
        raise MeshUsageError(
            "--address is where hosts find this one that announce themselves (--launch hand or "
            "torchrun): --interface chooses the network of all hosts"
        )
    return _choose_named(given, num_ranks), ""


def _choose_named(given: StartOptions, num_ranks: Any) -> tuple[Host, ...]:
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
