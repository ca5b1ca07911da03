"""Formats the tables, remarks and JSON that the `cellmesh` commands print."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from ..controller.session.living import FoundMesh, memory_bytes, processes_of
from ..wire.host import format_span
from ..wire.segments import format_bytes

_HEADERS = "NAME STATE RANKS MESH AGENT CONTROLLER AGE MEMORY"


@dataclass(frozen=True)
class Row:
    """A mesh in the table of `cellmesh ps`.

    Attributes:
        mesh: the mesh.
        pids: its processes on this machine, the agent's first.
        memory: memory of these, in bytes.
    """

    mesh: FoundMesh
    pids: tuple[int, ...] = ()
    memory: int = 0


def row_of(mesh: FoundMesh) -> Row:
    """Return a mesh with its processes on this machine and their memory."""
    processes = processes_of(mesh.ticket) if mesh.is_living else []
    pids = tuple(process.pid for process in processes)
    return Row(mesh, pids, memory_bytes(processes))


def describe_row(row: Row) -> dict[str, Any]:
    """Return the object of a mesh for JSON."""
    ticket, holder = row.mesh.ticket, row.mesh.holder
    now = time.time()
    return {
        "name": ticket.name,
        "state": row.mesh.state,
        "num_ranks": ticket.num_ranks,
        "mesh": dict(zip(ticket.mesh_dim_names, ticket.mesh_shape, strict=False)),
        "backend": ticket.backend,
        "agent_pid": ticket.agent_pid,
        "controller_pid": holder.controller_pid if holder is not None else ticket.controller_pid,
        "attached": row.mesh.state == "running",
        "lease_s": ticket.lease_s,
        "lease_left_s": row.mesh.lease_left_s(now),
        "pids": row.pids,
        "age_s": round(max(0.0, now - ticket.created_at), 3),
        "memory_bytes": row.memory,
        "hosts": [agent.name for agent in ticket.agents],
        "unheard": row.mesh.unheard,
        "num_refused": holder.num_refused if holder is not None else 0,
        "cwd": ticket.cwd,
        "directory": ticket.directory,
    }


def as_json(value: Any) -> str:
    """Return structs, dataclasses and containers as indented JSON."""
    return json.dumps(msgspec.to_builtins(value), indent=2)


def printable(text: str) -> str:
    """Escape a text's control characters, which a terminal would execute: texts from tickets are
    not trusted.
    """
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def echo_meshes(rows: Sequence[Row], problems: Sequence[str] = ()) -> None:
    """Print the table of `cellmesh ps`, and remarks on meshes that are not running.

    Args:
        rows: the meshes.
        problems: further remarks, such as on tickets that cannot be used here.
    """
    lines = [_cells(row) for row in rows if row.mesh.state not in ("dead", "elsewhere")]
    if lines:
        table = [(*_HEADERS.split(), "STARTED IN"), *lines]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            cells = zip(map(printable, line), widths, strict=True)
            click.echo("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    else:
        click.echo("no mesh is running")
    for text in (*(each for row in rows for each in _remarks(row.mesh)), *problems):
        click.echo(printable(text), err=True)


def _cells(row: Row) -> tuple[str, ...]:
    mesh, ticket = row.mesh, row.mesh.ticket
    dims = zip(ticket.mesh_dim_names, ticket.mesh_shape, strict=False)
    return (
        ticket.name,
        mesh.state,
        str(ticket.num_ranks),
        ",".join(f"{name}={size}" for name, size in dims),
        str(ticket.agent_pid or "-"),
        _holder(mesh),
        format_span(max(0.0, time.time() - ticket.created_at)),
        format_bytes(row.memory),
        ticket.cwd,
    )


def _holder(mesh: FoundMesh) -> str:
    """Return, as text, the process id of a mesh's controller or, without a controller, the time
    left of the mesh's lease.
    """
    left_s = mesh.lease_left_s(time.time())
    if left_s is not None:
        return f"none, {format_span(left_s)} left"
    if mesh.holder is None:
        return str(mesh.ticket.controller_pid)
    where = f" on {mesh.holder.host}" if mesh.ticket.spans_hosts and mesh.holder.host else ""
    return f"{mesh.holder.controller_pid}{where}"


def _remarks(mesh: FoundMesh) -> Iterator[str]:
    """Yield remarks on a mesh: why it is not running, and which of its hosts do not answer."""
    ticket, holder = mesh.ticket, mesh.holder
    name, unheard = ticket.name, ", ".join(mesh.unheard)
    if mesh.state == "dead":
        why = f"its agent, process {ticket.agent_pid}, has gone"
        if ticket.spans_hosts:
            why = f"nothing of it listens on {unheard}"
        done = "" if ticket.path.exists() else f": removed {ticket.directory}"
        yield f"{name} is dead ({why}){done}"
    elif mesh.state == "unheard":
        yield (
            f"{name}: none of its hosts answers ({unheard}); it may live on there until its lease "
            f"ends. `rm {ticket.path}` forgets it here"
        )
    elif mesh.state == "elsewhere":
        yield (
            f"{name} is not seen from here; it may run on another host or in a container. If not: "
            f"`rm {ticket.path}`"
        )
    elif unheard:
        yield f"{name}: {unheard} does not answer"
    if holder is not None and holder.num_refused:
        ago = format_span(max(0.0, time.time() - holder.refused_at))
        yield (
            f"{name} has refused {plural(holder.num_refused, 'peer')} without a key of it, the "
            f"last one {ago} ago"
        )


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``, ``2 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
