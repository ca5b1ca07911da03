"""Finds the agents of a mesh on many hosts for a controller that attaches, on any host that has a
copy of the mesh's ticket.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....errors import HostError, NoMeshError
from ....wire.host import this_place
from ....wire.ticket import (
    Ticket,
    make_directory,
    read_ticket,
    remove_own_directory,
    runtime_root,
    write_ticket,
)
from .standing import HostStanding, ask_agents

# As long as a host is waited for that is attached, on a machine that is loaded, too.
_ANSWER_S = 10.0


def find_agents(ticket: Ticket) -> tuple[Ticket, tuple[int, ...]]:
    """Find out where a mesh's agents are now, as some may have been replaced since the ticket was
    copied. Blocks.

    Args:
        ticket: of the mesh, as read; its directory may be on another host.

    Returns:
        The ticket with the agents as they are and a directory of this host, which need not exist,
        and the hosts whose agents do not answer, maybe as their way is to be found again.

    Raises:
        NoMeshError: no agent answers.
        HostError: another mesh of the same name is on this host.
    """
    directory = runtime_root() / ticket.name
    forget_if_ended(directory, ticket.mark)
    if os.path.lexists(directory) and read_ticket(directory / "ticket.json").mark != ticket.mark:
        raise HostError(
            f"{directory} is of another mesh that is named {ticket.name}: `cellmesh stop "
            f"{ticket.name}` ends that one"
        )
    standings = ask_agents(ticket, timeout_s=_ANSWER_S)
    ticket = with_newest_agents(ticket, standings)
    ticket = msgspec.structs.replace(ticket, directory=str(directory))
    if ticket.agents != tuple(each.agent for each in standings):
        standings = ask_agents(ticket, timeout_s=_ANSWER_S)
    lost = tuple(index for index, each in enumerate(standings) if each.standing is None)
    if len(lost) == len(standings) and not any(agent.via for agent in ticket.agents):
        raise _no_answer(ticket, standings)
    return ticket, lost


def with_newest_agents(ticket: Ticket, standings: Sequence[HostStanding]) -> Ticket:
    """Return the ticket with the agents that the mesh has now, as the one says that knows best."""
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
    """Write the ticket of a mesh that this host's controller has attached, for `cellmesh ps` and
    the next attach.

    Raises:
        HostError: it cannot be written.
    """
    if not os.path.lexists(ticket.directory):
        make_directory(Path(ticket.directory).parent, ticket.name)
    write_ticket(ticket)


def forget_if_ended(directory: Path, but: str = "") -> None:
    """Remove the directory of a mesh on many hosts if all its agents have ended. Blocks.

    Args:
        directory: the mesh's, on this host.
        but: the mark of a mesh to leave alone.
    """
    try:
        ticket = read_ticket(directory / "ticket.json")
    except HostError:
        return
    is_own = ticket.spans_hosts and ticket.mark != but and Path(ticket.directory) == directory
    if is_own and ticket.agents and all(each.has_ended for each in ask_agents(ticket)):
        remove_own_directory(ticket)


def _no_answer(ticket: Ticket, standings: Sequence[HostStanding]) -> NoMeshError:
    where = ", ".join(f"{each.agent.host} ({each.agent.endpoint})" for each in standings)
    if all(each.has_ended for each in standings):
        return NoMeshError(
            f"{ticket.name} has ended: nothing listens any longer at {where}. If its hosts have "
            f"been replaced since this ticket was copied, take the one of {ticket.place.host}; "
            "else `cellmesh ps` removes what is left, and `%dist_start` starts another"
        )
    return NoMeshError(
        f"no host of {ticket.name} answers: {where}. Are they up, and does a firewall let "
        f"{this_place().host} reach these ports?"
    )
