"""Brings lost hosts back: takes them back with what their ranks hold if they are heard again, else
starts another agent in their place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....errors import HostError
from ..launch.hosts import HostAgents
from .connections import HostConnections

# The loop takes up an order within milliseconds, unless the mesh has ended.
_ORDER_S = 5.0


def bring_back(
    hosts: HostConnections,
    launcher: HostAgents,
    post: Callable[[Callable[[], None]], None],
    may_replace: bool,
) -> None:
    """Make every lost host's ranks ones that a heal can reach. Blocks while agents start.

    Args:
        hosts: the connections to all hosts.
        launcher: starts agents.
        post: has the link's loop call a function.
        may_replace: whether a spare host may take the place of one that is not heard.

    Raises:
        HostError: no agent could be started for a host.
    """
    for index in hosts.lost:
        if index in hosts.returned:
            _call(post, lambda index=index: hosts.take_back(index))  # type: ignore[misc]
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
        _call(post, lambda i=index, t=ticket, gone=is_gone: hosts.replace(i, t, gone))  # type: ignore[misc]


def _call(post: Callable[[Callable[[], None]], None], action: Callable[[], None]) -> None:
    """Have the link's loop call a function, and wait until it has."""
    done = threading.Event()

    def act() -> None:
        try:
            action()
        finally:
            done.set()

    post(act)
    done.wait(_ORDER_S)
