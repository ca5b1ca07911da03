"""Writes the commands' tables, findings, progress and JSON; colours only to terminals."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ..controller.session.launch.reach import describe_detours
from .meshes import Found

_HEADERS = (
    "NAME",
    "STATE",
    "RANKS",
    "MESH",
    "AGENT",
    "CONTROLLER",
    "AGE",
    "MEMORY",
    "SEGMENTS",
    "STARTED IN",
)


def as_json(value: Any) -> str:
    """Return structs, dataclasses and containers as indented JSON."""
    return json.dumps(msgspec.to_builtins(value), indent=2)


_NOT_LISTED = ("elsewhere", "broken")  # a remark says it


def printable(text: str) -> str:
    """Escape what a terminal takes for a command: anybody may have made a ticket's texts."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def echo_meshes(
    rows: Sequence[tuple[Found, int, int]], swept: Collection[str], strange: Sequence[str] = ()
) -> None:
    """Write a table of meshes, and remarks on those that are not running.

    Args:
        rows: each mesh with its memory, and that of the segments which its controller holds, in
            bytes.
        swept: names of those whose directories were removed.
        strange: what is wrong with tickets that cannot be used here.
    """
    shown = [row for row in rows if row[0].ticket.name not in swept]
    if any(mesh.state not in _NOT_LISTED for mesh, *_ in shown):
        lines = [
            _HEADERS,
            *(_row(mesh, *sizes) for mesh, *sizes in shown if mesh.state not in _NOT_LISTED),
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADERS))]
        for number, line in enumerate(lines):
            text = "  ".join(
                printable(cell).ljust(width) for cell, width in zip(line, widths, strict=True)
            ).rstrip()
            click.echo(click.style(text, bold=True) if number == 0 else text)
    else:
        click.echo("no mesh is running")
    for mesh, *_ in rows:
        for remark in (
            _remark(mesh, mesh.ticket.name in swept),
            _refusals(mesh),
            _unheard(mesh),
            _ways(mesh),
        ):
            if remark:
                click.secho(printable(remark), fg="yellow", err=True)
    for text in strange:
        click.secho(printable(text), fg="yellow", err=True)


def _row(mesh: Found, memory: int, held: int) -> tuple[str, ...]:
    ticket = mesh.ticket
    dims = zip(ticket.mesh_dim_names, ticket.mesh_shape, strict=False)
    return (
        ticket.name,
        mesh.state,
        str(ticket.num_ranks),
        ",".join(f"{name}={size}" for name, size in dims),
        str(ticket.agent_pid or "-"),
        _holder(mesh),
        format_seconds(mesh.age_s),
        format_bytes(memory),
        format_bytes(held) if held else "-",
        _short(ticket.cwd),
    )


def _holder(mesh: Found) -> str:
    """Return the process of the controller that holds a mesh or, without a controller, for how long
    the mesh still lives.
    """
    left_s = mesh.lease_left_s(time.time())
    if left_s is not None:
        return f"none, {format_seconds(left_s)} left"
    if mesh.holder is None:
        return str(mesh.ticket.controller_pid)
    where = f" on {mesh.holder.host}" if mesh.ticket.spans_hosts and mesh.holder.host else ""
    return f"{mesh.holder.controller_pid}{where}"


def _refusals(mesh: Found) -> str:
    holder = mesh.holder
    if holder is None or not holder.num_refused:
        return ""
    ago = format_seconds(max(0.0, time.time() - holder.refused_at))
    return (
        f"{mesh.ticket.name} has refused {plural(holder.num_refused, 'peer')} without a key of it, "
        f"the last one {ago} ago"
    )


def _unheard(mesh: Found) -> str:
    if not mesh.unheard or not mesh.living:
        return ""
    return f"{mesh.ticket.name}: {', '.join(mesh.unheard)} does not answer"


def _ways(mesh: Found) -> str:
    """Say by which way its notebook reaches the hosts that are not reached straight."""
    ways = describe_detours(mesh.ticket.agents) if mesh.living else []
    return f"{mesh.ticket.name}: {'; '.join(ways)}" if ways else ""


def _remark(mesh: Found, swept: bool) -> str:
    name, directory = mesh.ticket.name, mesh.ticket.directory
    if swept:
        return f"{name} is dead ({_why_dead(mesh)}): removed {directory}" + (
            f" and ended processes {', '.join(map(str, mesh.pids))}" if mesh.pids else ""
        )
    if mesh.state == "leftover":
        pids = ", ".join(map(str, mesh.pids))
        return (
            f"{name}: its agent has gone, but not processes "
            f"{pids}: `cellmesh stop {name}` ends them"
        )
    if mesh.state == "unheard":
        return (
            f"{name}: none of its hosts answers ({', '.join(mesh.unheard)}); it may live on there "
            f"until its lease ends. `rm {mesh.ticket.path}` forgets it here"
        )
    if mesh.state == "broken":
        return f"{name}: {mesh.ticket.path} is no ticket of a mesh: {mesh.problem}"
    if mesh.state == "elsewhere":
        return (
            f"{name} is not seen from here; it may run on another host or in a container. If not: "
            f"`rm {mesh.ticket.path}`"
        )
    return f"{name} is dead, and {directory} could not be removed" if mesh.state == "stale" else ""


def _why_dead(mesh: Found) -> str:
    if mesh.ticket.spans_hosts:
        return f"nothing of it listens on {', '.join(mesh.unheard)}"
    return f"its agent, process {mesh.ticket.agent_pid}, has gone"


def _short(path: str) -> str:
    try:
        return str("~" / Path(path).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return path


def echo_progress(text: str) -> None:
    """Show on a terminal what is being done, in a line that the next call replaces.

    Args:
        text: what; "" when it is over.
    """
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}" + (" ..." if text else ""), nl=False, err=True)


def format_bytes(number: float) -> str:
    """Format bytes: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Format seconds: ``40 s``, ``5 min``, ``3 h``, ``2 days``; below a second ``30 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``, ``2 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
