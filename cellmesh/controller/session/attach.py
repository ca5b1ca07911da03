"""Attaches this process to a running mesh as its controller; ends meshes that have none."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ...errors import HostError, MeshUsageError, NoMeshError
from ...wire.host import Process, this_place
from ...wire.marks import VARIABLE, is_dead
from ...wire.modules import loaded
from ...wire.ticket import Ticket, read_ticket, runtime_root
from ..mesh import Mesh
from ..meshes import own_meshes
from ..output.calling_cell import current_sink
from ..output.console import Sink
from .guests import accept_guests
from .launch.local import (
    Launcher,
    LocalAgent,
)
from .living import (
    FoundMesh,
    choose,
    describe,
    end_left,
    find_living,
    forget_if_dead,
    look_at,
    missing,
)
from .session import Session
from .standing import describe_runs, find_agents, keep_ticket

_ATTACH_S = 10.0
_READY_S = 120.0


def attach(
    name: str | None = None,
    *,
    steal: bool = False,
    sink: Sink | None = None,
    visits: bool = False,
) -> Mesh:
    """Attach this process to a running mesh, whose ranks have kept all their state.

    Output that was missed is shown, and runs in flight can be awaited (`Mesh.runs`).

    Args:
        name: name of the mesh; may be left out if only one lives or is free, or only one of these
            is of the calling notebook. For a mesh on many hosts, also the path of its
            ``ticket.json``, or of a copy on another host.
        steal: whether to take the mesh from a process that holds it; runs of that process then end
            with an error.
        sink: receives the output of runs in flight; None for the calling notebook cell or the
            console.
        visits: whether this process is a command that leaves the mesh after one act; the output of
            earlier runs is kept for the next controller.

    Returns:
        The mesh.

    Raises:
        NoMeshError: there is no such mesh, it has ended, or another process holds it.
        HostError: it cannot be used from here: its host, user or version is another one.
        MeshUsageError: this process is a rank.
    """
    if os.environ.get(VARIABLE, "").endswith(f":{os.getpid():07}") and "LOCAL_RANK" in os.environ:
        raise MeshUsageError(
            f"this process is rank {os.environ.get('RANK')} of a mesh, and its notebook directs "
            "that: give ranks the handles of other meshes' actors; the notebook or `cellmesh stop` "
            "ends a mesh"
        )
    ticket = _find_ticket(name, steal)
    check_ticket(ticket)
    if ticket.spans_hosts:
        from .launch.hosts import HostAgents

        forget_if_dead(ticket.name, but=ticket.mark)
        ticket = find_agents(ticket)
        launcher: Launcher = HostAgents(ticket, report=_show)
    else:
        launcher = LocalAgent(ticket, Process(ticket.agent_pid, ticket.agent_ticks))
    try:
        end = launcher.start()
    except HostError as error:
        raise NoMeshError(f"{ticket.name} cannot be attached: {error}") from error
    ticket = launcher.ticket  # with the routes from here to the agents
    session = Session(
        ticket,
        launcher,
        end,
        steal=steal,
        sink=sink or current_sink(),
        is_found=True,
        visits=visits,
        lost=launcher.unheard,
    )
    if not visits:  # it sends no functions
        loaded.record()
    session.wait_until_attached(_ATTACH_S)
    session.wait_until_ready(_READY_S)
    if ticket.spans_hosts:
        keep_ticket(ticket)
    mesh = Mesh(session)
    own_meshes().add(mesh)  # functions of its actors may name it
    if not visits and any(Path(ticket.directory).glob("actor-*")):
        from ..actors import restore

        for remark in restore(mesh.rank_set):
            (sink or current_sink()).note(remark)
    accept_guests(mesh, visits)
    return mesh


def find_mesh(name: str | None) -> FoundMesh:
    """Return the living mesh of this name or, without a name, the only living mesh.

    Whether a process holds it is for the caller (`FoundMesh.is_free`). Blocks at most two seconds,
    for a mesh on many hosts.

    Raises:
        NoMeshError: there is no such mesh, or it has ended.
        MeshUsageError: no name is given, and several meshes live.
        HostError: the mesh cannot be used from here: its host, user or version is another one.
    """
    root = runtime_root()
    if name and "/" not in name and os.path.exists(path := root / name / "ticket.json"):
        ticket = read_ticket(path)
        check_ticket(ticket)
        return look_at(ticket, root)
    living = find_living(asks=True)
    if name is None and len(living) == 1:
        return living[0]
    names = [mesh.name for mesh in living]
    if name is None and living:
        raise MeshUsageError(f"{len(living)} meshes live: name one of {', '.join(names)}")
    raise missing(name, names)


def stop_mesh(name: str) -> None:
    """End a mesh that no process controls, and with it the state of its ranks. Blocks.

    Args:
        name: name of the mesh.

    Raises:
        NoMeshError: there is no such mesh, or it has ended.
        MeshUsageError: another process holds it.
        HostError: it cannot be ended from here.
    """
    ticket = _find_ticket(name, False)
    check_ticket(ticket)
    mesh = look_at(ticket, Path(ticket.directory).parent)
    if mesh.state == "unheard":
        raise NoMeshError(
            f"no host of {name} answers: `cellmesh stop {name}` says more, and ends it once they do"
        )
    end_left(mesh)


def _find_ticket(name: str | None, steal: bool) -> Ticket:
    root = runtime_root()
    if name is not None:
        path = root / name / "ticket.json"
        if name.endswith(".json"):  # of a mesh on many hosts, maybe copied here
            return read_ticket(Path(name).expanduser())
        if "/" not in name and os.path.exists(path):
            return read_ticket(path)
    living = find_living(asks=True)
    if name is None and (chosen := choose(living, steal)) is not None:
        return chosen.ticket
    if name is None and living:
        free = [mesh.name for mesh in living if mesh.is_free]
        example = free[-1] if free else f"--steal {living[-1].name}"
        lines = "\n".join(
            f"{describe(mesh, time.time())}; runs {describe_runs(mesh.ticket)}" for mesh in living
        )
        raise MeshUsageError(
            f"there are {len(living)} meshes: say which one, as in `%dist_attach {example}`\n"
            f"{lines}"
        )
    raise missing(name, [mesh.name for mesh in living])


def check_ticket(ticket: Ticket) -> None:
    """Raise an error if this process cannot attach to the mesh of a ticket.

    Raises:
        NoMeshError: the mesh has ended.
        HostError: its processes are on another host or in another container, or the ticket is an
            agent's.
    """
    here = this_place()
    if ticket.host is not None:
        raise HostError(
            f"that is the ticket of the agent on {ticket.host.name}: use the one that the host of "
            f"the notebook has, cellmesh/{ticket.name}/ticket.json under its runtime directory"
        )
    if ticket.spans_hosts:
        return
    place = ticket.place
    if is_dead(ticket):
        raise NoMeshError(
            f"{ticket.name} has ended: `cellmesh ps` removes what is left of it; `%dist_start` "
            "starts another"
        )
    if (place.boot, place.pid_namespace) != (here.boot, here.pid_namespace):  # names may change
        where = "another container of this host" if place.boot == here.boot else "another host"
        raise HostError(
            f"{ticket.name} runs in {where} ({place.host}; this is {here.host}): attach to it there"
        )


def _show(text: str, stays: bool) -> None:
    if stays:
        current_sink().note(text)
