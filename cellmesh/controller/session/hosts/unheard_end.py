"""Ends the agents that did not hear their mesh end: of hosts that are lost, cut, or replaced."""

from __future__ import annotations

import msgspec

from ..launch.hosts import HostAgents
from ..launch.launcher import Launcher
from .connections import HostConnections
from .standing import describe_left, end_agents

_END_S = 5.0


def end_unheard(hosts: HostConnections | None, launcher: Launcher) -> str:
    """Ask the agents at their ports to end, and return what is to be said of those that do not
    answer; "" if none is left, as of a mesh on this machine alone. Blocks.

    Args:
        hosts: the connections to many hosts, closed by now.
        launcher: has the mesh's ticket with its present hosts.
    """
    if hosts is None or not isinstance(launcher, HostAgents):
        return ""
    unended = hosts.unended(launcher.ticket.replaced)
    ticket = msgspec.structs.replace(launcher.ticket, agents=tuple(unended), replaced=())
    left = end_agents(ticket, _END_S) if unended else []
    return describe_left(ticket, left) if left else ""
