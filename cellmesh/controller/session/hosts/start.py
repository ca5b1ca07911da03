"""Starts new agents in place of those of lost hosts, or takes back lost hosts that can be reached
again; ends agents that have not received the order to end their mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire.hosts import Host
from ....wire.modules import loaded
from ....wire.ticket import Ticket
from ...code_files.sync import FILES_S, Answers, CodeSync, Make
from ...core.core import Core, Effect
from ...host_list import parse_hosts
from ...news import Reply
from ..launch.local import Launcher
from ..link import Link, warn
from ..standing import describe_left, end_agents
from .connections import Connections

_T = TypeVar("_T")
Post = Callable[[Callable[[Core, float], Sequence[Effect]]], None]


class Claim:
    """The right to execute or withdraw a queued function call, which either the link's thread or
    the requesting thread gets.
    """

    def __init__(self) -> None:
        self._left = [None]

    def take(self) -> bool:
        """Take the right to execute or withdraw the call; return False if the other thread has
        taken it.
        """
        try:
            self._left.pop()  # in one step, whatever the other thread does
        except IndexError:
            return False
        return True


def call_in_loop(post: Post, action: Callable[[], _T]) -> _T:
    """Have the link's thread call a function; return the function's result, or raise its exception.

    Args:
        post: queues a command for the link's loop.
        action: the function.

    Raises:
        NoMeshError: the mesh has ended, and its loop with it.
    """
    reply: Reply[_T] = Reply()

    def act(core: Core, now: float) -> Sequence[Effect]:
        try:
            reply.give(action())
        except BaseException as error:
            reply.fail(error)
        return ()

    post(act)
    return reply.result()


def bring_back(
    hosts: Connections,
    launcher: Launcher,
    post: Post,
    new_hosts: str | Iterable[str],
    code: CodeSync | None,
) -> str:
    """Before a heal, take back each lost host that can be reached again, and start new agents in
    place of the others. Blocks while agents start.

    Args:
        hosts: the connections to all hosts.
        launcher: starts the new agents, all at once.
        post: queues a command for the link's loop.
        new_hosts: hosts that take the place of lost ones (`choose_places`).
        code: sends the user's modules to all hosts; zygotes of new agents wait for them.

    Returns:
        Why some hosts could not be brought back, while others were; "" if all were.

    Raises:
        MeshUsageError: a new host cannot take a lost one's place; nothing has changed.
        HostError: no host could be brought back, or one cannot receive the modules.
        NoMeshError: the mesh has ended.
    """
    lost = hosts.lost
    before = launcher.ticket.agents
    places = choose_places(new_hosts, lost, before)
    names: dict[int, str] = {}  # hosts on which agents are started
    for index in lost:
        if not call_in_loop(post, functools.partial(hosts.take_back, index)):
            names[index] = places.get(index, before[index].name)
    failed = launcher.start_again(names, given_up=places.keys()) if names else {}
    ticket = launcher.ticket
    for index in sorted(names.keys() - failed.keys()):
        is_gone = ticket.agents[index].name == before[index].name
        call_in_loop(post, functools.partial(hosts.replace, index, ticket, is_gone))
    lines = [
        f"{before[index].name} is lost, and no agent could be started: {error}"
        for index, error in sorted(failed.items())
    ]
    if lines:
        lines.append("`%dist_heal --hosts NAME` puts another host in a lost one's place")
    text = "\n".join(lines)
    if failed and len(failed) == len(lost):
        raise HostError(text)
    if code is not None:
        if lost:
            code.forget()
        code.bring(timeout_s=FILES_S)  # also modules that an earlier heal could not send
    return text


def choose_places(
    new_hosts: str | Iterable[str], lost: Sequence[int], agents: Sequence[Host]
) -> dict[int, str]:
    """Choose for each new host the lost host that it replaces: the one of the same name, else the
    first one with as many ranks. Pure.

    Args:
        new_hosts: names and numbers of ranks, e.g. ``c:4,d:4``; ``c`` for any number.
        lost: the indices of the lost hosts.
        agents: the agents of all hosts.

    Returns:
        Index of a lost host -> name of the new host.

    Raises:
        MeshUsageError: no lost host is left for a new host, or that has ranks of the mesh already.
    """
    words = (
        new_hosts.split(",") if isinstance(new_hosts, str) else [str(each) for each in new_hosts]
    )
    left, places = [agents[index] for index in lost], dict[int, str]()
    living = {agent.name for agent in agents} - {agent.name for agent in left}
    for word in filter(None, map(str.strip, words)):
        (entry,) = parse_hosts([word], nproc_per_host=None if ":" in word else 1)
        fitting = [each for each in left if ":" not in word or each.num_ranks == entry.num_ranks]
        own = [each for each in fitting if each.name == entry.name]
        if entry.name in living:
            raise MeshUsageError(f"{entry.name} has ranks of the mesh: name another host")
        if not fitting:
            among = ", ".join(f"{each.name}:{each.num_ranks}" for each in left)
            raise MeshUsageError(
                f"no lost host is there whose place {word} could take "
                f"({f'lost: {among}' if among else 'no further one is lost'})"
            )
        place = (own or fitting)[0]
        left.remove(place)
        places[agents.index(place)] = entry.name
    return places


_END_S = 5.0


def end_unheard(hosts: Connections, ticket: Ticket) -> str:
    """End the agents that have not reported their end; return a text on the agents that do not
    answer, "" without such agents. Blocks.

    Args:
        hosts: the connections to the agents, which are closed already.
        ticket: ticket of the mesh, with its present hosts.
    """
    unended = [agent for agent in hosts.unended(ticket.replaced) if agent.public_key]
    ticket = msgspec.structs.replace(ticket, agents=tuple(unended), replaced=())
    left = end_agents(ticket, _END_S) if unended else []
    return describe_left(ticket, left) if left else ""


def sync_through(hosts: Connections, link: Link, ticket: Ticket) -> CodeSync:
    """Return a `CodeSync` that sends the user's modules over the connections to a mesh's agents.

    Args:
        hosts: the connections to the agents.
        link: the link in whose loop they are used.
        ticket: ticket of the mesh.
    """

    def ask(make: Make, timeout_s: float | None) -> Answers:
        link.check_may_wait()
        reply: Reply[Answers] = Reply()
        call_in_loop(link.post, lambda: hosts.ask_files(make, reply))
        try:
            return reply.result(timeout_s)
        except TimeoutError:
            silent = ",".join(hosts.unanswered(reply))
            raise HostError(
                f"{silent}: no answer about the files beside the notebook for {timeout_s:.0f} s. "
                "`%dist_status` says whether they are heard"
            ) from None

    return CodeSync(ticket.roots, ask, hosts.name_of, lambda: loaded.num_loads, warn)
