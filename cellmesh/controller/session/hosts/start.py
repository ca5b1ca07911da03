"""Starts agents in place of those of lost hosts, or takes the hosts back if they are heard again;
at the end of a mesh, ends the agents that did not hear it.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from ....errors import HostError
from ...code_files.sync import CodeSync
from ...core.core import Core, Effect
from ..launch.hosts import HostAgents
from ..launch.launcher import Launcher
from .answers import FILES_S
from .connections import HostConnections
from .standing import describe_left, end_agents

_T = TypeVar("_T")
Post = Callable[[Callable[[Core, float], Sequence[Effect]]], None]
# The loop takes up an order within milliseconds, unless callbacks keep it.
_ORDER_S = 30.0


def call_in_loop(post: Post, action: Callable[[], _T]) -> _T:
    """Have the link's loop call a function; return the function's result, or raise its exception.

    Args:
        post: gives the link's loop a command.
        action: is called there.

    Raises:
        NoMeshError: the mesh has ended, and its loop with it.
        HostError: the loop does not get to it in time; it will not call the function any more.
    """
    result: Future[_T] = Future()

    def act(core: Core, now: float) -> Sequence[Effect]:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(action())
            except BaseException as error:
                result.set_exception(error)
        return ()

    post(act)
    done, _ = concurrent.futures.wait([result], _ORDER_S)
    if not done and result.cancel():
        raise HostError(f"the notebook's link to the mesh is busy for {_ORDER_S:.0f} s: try again")
    return result.result()


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
