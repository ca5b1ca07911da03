"""Asks the agents of a mesh for its state without being its controller: to list meshes, to attach
to one, also from another host with a copy of its ticket, and to end one on many hosts.

The processes of such a mesh are on other hosts, so that only its agents know whether it lives.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from ...errors import HostError, NoMeshError, ProtocolError
from ...wire import transport
from ...wire.attach import Inquire, Standing
from ...wire.codec import Parcel, at_controller, encode
from ...wire.host import format_span, this_place
from ...wire.hosts import Host
from ...wire.own_file import SecretBytes
from ...wire.process import FILES_A_HOST, make_room
from ...wire.ranks import describe_ranks
from ...wire.reliable import Reliable
from ...wire.ticket import (
    Holder,
    Ticket,
    make_directory,
    read_ticket,
    runtime_root,
    write_ticket,
)

# Time limit of an agent's answer; a handshake takes three round trips.
ANSWER_S = 2.0
_PAUSE_S = 0.05
_MAX_RUNS = 2  # most runs of a mesh that are named


class HostStanding(msgspec.Struct, frozen=True):
    """The answer of one host's agent to a question about the mesh's state, and whether the agent
    has ended.

    Attributes:
        agent: the agent's host.
        standing: its answer; None if it has not answered.
        has_ended: whether it has ended, as its port refuses connections; False for an agent that
            is reached through ssh, as a firewall refuses connections, too.
    """

    agent: Host
    standing: Standing | None
    has_ended: bool = False


def ask_agents(
    ticket: Ticket, *, ends: bool = False, timeout_s: float = ANSWER_S
) -> list[HostStanding]:
    """Ask all agents of a mesh for its state. Blocks.

    Args:
        ticket: ticket of the mesh on the notebook's host, or of a mesh on this host.
        ends: whether the agents are to end the mesh.
        timeout_s: time limit of all answers, in seconds.
    """
    agents = ticket.all_agents
    answers = ask_at(ticket, _ways_to(agents), timeout_s, ends)
    ended = _find_ended([agent for agent in ticket.agents if agent not in answers], timeout_s)
    return [HostStanding(each, answers.get(each), each in ended) for each in agents]


def end_agents(ticket: Ticket, timeout_s: float) -> list[Host]:
    """End a mesh on many hosts through its agents, including replaced ones that may still run, and
    wait for their end. Blocks.

    Args:
        ticket: ticket of the mesh on the notebook's host.
        timeout_s: time limit of the agents' end, in seconds.

    Returns:
        The agents that are not known to have ended.
    """
    deadline = time.monotonic() + timeout_s
    ticket = msgspec.structs.replace(ticket, agents=(*ticket.agents, *ticket.replaced))
    asked = ask_agents(ticket, ends=True)
    silent = [each.agent for each in asked if each.standing is None and not each.has_ended]
    # An agent behind ssh, whose end is not seen, has got the order.
    left = [each.agent for each in asked if each.standing is not None and not each.agent.via]
    while left and time.monotonic() < deadline:
        # An agent closes its socket last, after the end of its processes and files.
        ended = _find_ended(left, ANSWER_S)
        left = [agent for agent in left if agent not in ended]
        if left:
            time.sleep(_PAUSE_S)
    return [*silent, *left]


def describe_left(ticket: Ticket, left: Sequence[Host]) -> str:
    """Return a text for users on the hosts where a mesh may still run: for how long, and how to end
    it there.

    Args:
        ticket: ticket of the mesh on the notebook's host.
        left: the agents that are not known to have ended.
    """
    where = ", ".join(f"{agent.name} ({agent.endpoint})" for agent in left)
    span = format_span(ticket.host_lease_s + ticket.lease_s)
    return (
        f"{ticket.name} may live on: {where} did not answer. Ranks keep their memory and GPUs "
        f"there for up to {span} (the mesh's lease). `cellmesh stop {ticket.name}` ends them: here "
        "once the host is reached again, or there at any time. The ticket stays for that: "
        f"`rm {ticket.path}` forgets it"
    )


def summarize(standings: Sequence[HostStanding], own: Holder | None = None) -> Holder | None:
    """Return the present or last controller of a mesh, from the answers of its agents; None if no
    agent has answered.

    Args:
        standings: answers of the agents.
        own: peers that the notebook's listener has refused, if it has a listener.
    """
    holders = [each.standing.holder for each in standings if each.standing is not None]
    if not holders:
        return None
    counted = [*holders, *([own] if own is not None else [])]
    # An agent that has lost its connection to the controller may report that there is none.
    holder = max(holders, key=lambda holder: (holder.is_attached, holder.since))
    return msgspec.structs.replace(
        holder,
        num_refused=sum(each.num_refused for each in counted),
        refused_at=max(each.refused_at for each in counted),
    )


def describe_runs(ticket: Ticket) -> str:
    """Ask the agents of a mesh for the runs in flight; return these and their ranks, as text.
    Blocks.
    """
    runs: dict[str, set[int]] = {}
    for each in ask_agents(ticket):
        for info in each.standing.runs if each.standing is not None else ():
            runs.setdefault(info.title or "a call", set()).update(info.ranks)
    parts = [f"{title} on {describe_ranks(ranks)}" for title, ranks in runs.items()]
    more = [f"{len(parts) - _MAX_RUNS} more"] if len(parts) > _MAX_RUNS else []
    return ", ".join([*parts[:_MAX_RUNS], *more]) or "nothing"


def _ways_to(agents: Sequence[Host]) -> list[tuple[Host, str]]:
    """Return pairs of an agent and an endpoint: each agent's own port and, if there is one, its
    port forwarding by ssh.
    """
    return [(agent, way) for agent in agents for way in {agent.endpoint, agent.reached_at}]


def ask_at(
    ticket: Ticket, ways: Sequence[tuple[Host, str]], timeout_s: float, ends: bool = False
) -> dict[Host, Standing]:
    """Ask agents at given endpoints for the state of their mesh, and return the answers. Blocks.

    Args:
        ticket: ticket of the mesh on the notebook's host, or of a mesh on this host.
        ways: pairs of an agent and an endpoint at which it may be reached.
        timeout_s: time limit of all answers, in seconds.
        ends: whether the agents are to end the mesh.
    """
    deadline = time.monotonic() + timeout_s
    question = [
        Reliable[None]().wrap_aside(),
        *map(SecretBytes, encode([Parcel(Inquire(bytes.fromhex(ticket.key), ends))])),
    ]
    decode = at_controller().decode
    answers: dict[Host, Standing] = {}
    asked = {agent for agent, _ in ways}
    make_room(FILES_A_HOST * len(ways))
    context = transport.make_context(max(1, len(ways)))
    poller = zmq.Poller()
    agents: dict[transport.Socket, Host] = {}
    monitors: dict[transport.Socket, transport.Socket] = {}
    try:
        for agent, endpoint in ways:
            keys = (ticket.curve_secret, agent.public_key) if agent.public_key else None
            dealer, monitor = transport.connect_dealer(
                context, endpoint, b"Q" + os.urandom(16), keys
            )
            poller.register(dealer, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            agents[dealer], monitors[monitor] = agent, dealer
        while len(answers) < len(asked):
            ready = poller.poll(max(0, round((deadline - time.monotonic()) * 1000)))
            if not ready:
                break
            for dealer, _ in ready:
                if dealer in monitors:
                    if any(transport.hear_connection(dealer)):
                        transport.send(monitors[dealer], list(question))
                    continue
                try:
                    (parcel,) = decode(transport.receive(dealer)[1:])
                except (ProtocolError, ValueError):
                    continue
                if isinstance(parcel.verb, Standing):
                    answers[agents[dealer]] = parcel.verb
    finally:
        context.destroy(linger=0)
    return answers


def _find_ended(agents: Sequence[Host], timeout_s: float) -> set[Host]:
    """Return the agents that have ended, as their ports refuse connections. Agents that are reached
    through ssh are left out.
    """
    ended: set[Host] = set()
    for agent in agents:
        if agent.via:
            continue
        address = agent.address, int(agent.endpoint.rpartition(":")[2])
        try:
            socket.create_connection(address, timeout_s / len(agents)).close()
        except ConnectionRefusedError:
            ended.add(agent)
        except OSError:  # it is out of reach, which costs its share of the time
            pass
    return ended


# As long as an attach waits for an agent, which may be on a loaded machine.
_ANSWER_S = 10.0


def find_agents(ticket: Ticket) -> Ticket:
    """Ask a mesh's agents which agents its hosts have now, as some may have been replaced since the
    ticket was copied. Blocks.

    Args:
        ticket: ticket of the mesh, as read; its directory may be on another host.

    Returns:
        The ticket with the present agents and a directory of this host, which need not exist.

    Raises:
        NoMeshError: no agent answers.
        HostError: this host has another mesh of the same name.
    """
    directory = runtime_root() / ticket.name
    if os.path.lexists(directory) and read_ticket(directory / "ticket.json").mark != ticket.mark:
        raise HostError(
            f"{directory} is of another mesh that is named {ticket.name}: `cellmesh stop "
            f"{ticket.name}` ends that one"
        )
    standings = ask_agents(ticket, timeout_s=_ANSWER_S)
    is_silent = not any(each.standing for each in standings)
    if is_silent and not any(agent.via for agent in ticket.agents):
        where = ", ".join(f"{each.agent.name} ({each.agent.endpoint})" for each in standings)
        raise NoMeshError(
            f"no host of {ticket.name} answers: {where}. The mesh has ended, or "
            f"{this_place().host} does not reach these ports; or its hosts have been replaced "
            f"since this ticket was copied from {ticket.place.host}: copy it again"
        )
    ticket = with_newest_agents(ticket, standings)
    return msgspec.structs.replace(ticket, directory=str(directory))


def with_newest_agents(ticket: Ticket, standings: Sequence[HostStanding]) -> Ticket:
    """Return the ticket with the mesh's present agents, taken from the agent whose list is the
    newest.
    """
    for each in standings:
        known = each.standing.agents if each.standing is not None else None
        if known is not None and known.revision > ticket.agents_revision:
            ticket = msgspec.structs.replace(
                ticket,
                agents=known.agents,
                agents_revision=known.revision,
                num_ranks=sum(agent.num_ranks for agent in known.agents),
                num_resizes=known.num_resizes,
            )
    return ticket


def keep_ticket(ticket: Ticket) -> None:
    """Write the ticket of a mesh that this process has attached to, for `cellmesh ps` and the next
    attach.

    Raises:
        HostError: the ticket cannot be written.
    """
    if not os.path.lexists(ticket.directory):
        make_directory(Path(ticket.directory).parent, ticket.name)
    write_ticket(ticket)
