"""Brings lost hosts back: takes them back with what their ranks hold if they are heard again, else
starts another agent in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ....errors import HostError, NoMeshError
from ..launch.hosts import HostAgents
from .connections import HostConnections

_T = TypeVar("_T")
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
        NoMeshError: the mesh has ended.
    """
    for index in hosts.lost:
        if _call(post, functools.partial(hosts.take_back, index)):
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
        _call(post, functools.partial(hosts.replace, index, ticket, is_gone))


def _call(post: Callable[[Callable[[], None]], None], action: Callable[[], _T]) -> _T:
    """Have the link's loop call a function, and return its result.

    Raises:
        NoMeshError: the mesh has ended, and its loop with it.
    """
    result: Future[_T] = Future()

    def act() -> None:
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    post(act)
    try:
        return result.result(_ORDER_S)
    except TimeoutError:
        raise NoMeshError("the mesh has ended: start one with `%dist_start`") from None
