"""Brings lost hosts back: takes them back with what their ranks hold if they are heard again, else
starts another agent in their place.
"""

from __future__ import annotations

import functools

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
) -> None:
    """Make every lost host's ranks ones that a heal can reach. Blocks while agents start.

    Args:
        hosts: the connections to all hosts.
        launcher: starts agents.
        post: has the link's loop call a function.
        may_replace: whether a spare host may take the place of one that is not heard.
        code: keeps the user's modules the same on all hosts; new agents' zygotes wait for them.

    Raises:
        HostError: no agent could be started for a host, or one cannot have the modules.
        NoMeshError: the mesh has ended.
    """
    lost_hosts = hosts.lost
    for index in lost_hosts:
        if call_in_loop(post, functools.partial(hosts.take_back, index)):
            continue
        spare = launcher.ticket.spares[0] if may_replace and launcher.ticket.spares else ""
        lost = launcher.ticket.agents[index].host
        try:
            launcher.start_again(index, spare, replaces=may_replace)
        except HostError as error:
            more = ""
            if launcher.ticket.spares and not may_replace:
                more = f" `%dist_heal --replace` uses {launcher.ticket.spares[0]} in its place."
            raise HostError(
                f"{lost} is lost, and no agent could be started: {error}.{more}"
            ) from None
        ticket = launcher.ticket
        is_gone = ticket.agents[index].host == lost
        call_in_loop(post, functools.partial(hosts.replace, index, ticket, is_gone))
    if code is not None:
        if lost_hosts:
            code.forget()
        code.bring(timeout_s=FILES_S)  # also what a host could not have at the heal before
