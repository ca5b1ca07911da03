"""Brings lost hosts back: takes them back with what their ranks hold if they are heard again, else
starts other agents in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from ....errors import HostError
from ...code_files.sync import CodeSync
from ..launch.hosts import HostAgents
from .connections import HostConnections
from .file_requests import FILES_S
from .loop_call import Post, call_in_loop


def bring_back(
    hosts: HostConnections,
    launcher: HostAgents,
    post: Post,
    may_replace: bool,
    code: CodeSync | None,
) -> str:
    """Make the ranks of lost hosts ones that a heal can reach. Blocks while agents start.

    Args:
        hosts: the connections to all hosts.
        launcher: starts agents, all at once.
        post: gives the link's loop a command.
        may_replace: whether spare hosts may take the place of those that are not heard.
        code: keeps the user's modules the same on all hosts; new agents' zygotes wait for them.

    Returns:
        Why some hosts could not be brought back, while others were; "" if all were.

    Raises:
        HostError: no host could be brought back, or one cannot have the modules.
        NoMeshError: the mesh has ended.
    """
    lost = hosts.lost
    before, spares = launcher.ticket.agents, list(launcher.ticket.spares if may_replace else ())
    names: dict[int, str] = {}  # of the hosts on which agents are started
    for index in lost:
        if not call_in_loop(post, functools.partial(hosts.take_back, index)):
            names[index] = spares.pop(0) if spares else before[index].host
    failed = launcher.start_again(names, replaces=may_replace) if names else {}
    ticket = launcher.ticket
    for index in sorted(names.keys() - failed.keys()):
        is_gone = ticket.agents[index].host == before[index].host
        call_in_loop(post, functools.partial(hosts.replace, index, ticket, is_gone))
    lines = {before[index].host: error for index, error in sorted(failed.items())}
    text = describe_failures(lines, "" if may_replace or not ticket.spares else ticket.spares[0])
    if failed and len(failed) == len(lost):
        raise HostError(text)
    if code is not None:
        if lost:
            code.forget()
        code.bring(timeout_s=FILES_S)  # also what a host could not have at the heal before
    return text


def describe_failures(errors: Mapping[str, HostError], spare: str) -> str:
    """Say which lost hosts could not be brought back, and why; "" if all were. Pure.

    Args:
        errors: by host.
        spare: a host that could take the place of one; "" for none.
    """
    lines = [
        f"{host} is lost, and no agent could be started: {error}" for host, error in errors.items()
    ]
    if lines and spare:
        lines.append(f"`%dist_heal --replace` uses {spare} in its place")
    return "\n".join(lines)


def describe_replaced(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Say which hosts of a mesh have taken the place of which. Pure.

    Args:
        before, now: the hosts' names, in the order of their ranks.
    """
    return [
        f"{name} has taken the place of {old}"
        for old, name in zip(before, now, strict=True)
        if name != old
    ]
