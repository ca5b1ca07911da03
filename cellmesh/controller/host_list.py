"""Which hosts a mesh runs on, how many ranks on each, and the command that starts an agent there.
Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MeshUsageError

# OpenSSH's client, with what its user has configured; it asks nothing, as nobody could answer.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host} {command}"
_MAX_HOSTS = 256
# Values of --launch with which hosts announce themselves: nothing is started on them from here.
INVITING = ("hand", "torchrun")


@dataclass(frozen=True)
class HostEntry:
    """One host of a mesh.

    Attributes:
        name: as the user named it; what `{host}` stands for. "" for a host that names itself.
        num_ranks: on it.
    """

    name: str
    num_ranks: int


def awaited_hosts(
    launch: str, nodes: int | None, num_ranks: int | None, nproc_per_host: int | None
) -> tuple[HostEntry, ...]:
    """Return hosts that announce themselves, or that one command gets; their names are not known.

    Args:
        launch: one of `INVITING`, or the name or the command line of an engine.
        nodes: how many.
        num_ranks: of all of them.
        nproc_per_host: ranks of each.

    Raises:
        MeshUsageError: a number is missing, or cannot be.
    """
    if nodes is None or isinstance(nodes, bool) or not 1 <= nodes <= _MAX_HOSTS:
        raise MeshUsageError(
            f"on how many hosts does --launch {launch!r} run agents? Say it, like --nodes 2 "
            f"(1 to {_MAX_HOSTS}), not {nodes}"
        )
    names = [f"host{number}" for number in range(nodes)]
    entries = parse_hosts(names, num_ranks, nproc_per_host)
    return tuple(HostEntry("", entry.num_ranks) for entry in entries)


def parse_hosts(
    hosts: str | Sequence[str], num_ranks: int | None = None, nproc_per_host: int | None = None
) -> tuple[HostEntry, ...]:
    """Read hosts and their numbers of ranks.

    Args:
        hosts: ``a:4,b:4``, or ``a,b`` if one of the other arguments says how many ranks each has.
        num_ranks: of all hosts; divided equally where a host names no number.
        nproc_per_host: of each host that names no number.

    Raises:
        MeshUsageError: they cannot be read, are named twice, or do not sum up to `num_ranks`.
    """
    words = hosts.split(",") if isinstance(hosts, str) else [str(host) for host in hosts]
    words = [word.strip() for word in words if word.strip()]
    if not words:
        raise MeshUsageError("--hosts names no host: write them like a:4,b:4")
    if len(words) > _MAX_HOSTS:
        raise MeshUsageError(f"--hosts names {len(words)} hosts, and at most {_MAX_HOSTS} may be")
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
    entries = tuple(HostEntry(name, number or 0) for name, number in named.items())
    total = sum(entry.num_ranks for entry in entries)
    if num_ranks is not None and total != num_ranks:
        raise MeshUsageError(f"the hosts have {total} ranks in all, and the mesh {num_ranks}")
    return entries


def has_stdin(template: str) -> bool:
    """Whether the command of a template gets the ticket by its standard input; else the template
    names the ticket's file, which it brings to the host.
    """
    return "{ticket}" not in template


def command_for(
    template: str, host: str, command: Sequence[str], ticket: str = "", mesh: str = ""
) -> list[str]:
    """Return the command line that starts an agent on a host, or those of all hosts.

    Args:
        template: such as ``kubectl exec -i {host} -- {command}``; "" for ssh. ``{command}`` as a
            word of its own stands for all words of the command, else for the command as a text that
            a shell reads. ``{ticket}`` stands for the ticket's file, ``{mesh}`` for the mesh's
            name.
        host: what ``{host}`` stands for.
        command: what is to run there.
        ticket: what ``{ticket}`` stands for.
        mesh: what ``{mesh}`` stands for.

    Raises:
        MeshUsageError: the template does not say where the command stands.
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
            for mark, value in (("host", host), ("ticket", ticket), ("mesh", mesh)):
                word = word.replace(f"{{{mark}}}", value)
            argv.append(word.replace("{command}", text))
    return argv
