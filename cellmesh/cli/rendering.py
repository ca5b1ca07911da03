"""Writes the commands' tables, findings, progress and JSON; colours only to terminals."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ..controller.session.launch.reach import describe_detours
from .doctor.checks import Finding, Status
from .meshes import Found
from .text import format_bytes, format_seconds, plural

_MAX_WIDTH = 110
_STYLES: dict[Status, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "warning": {"fg": "yellow"},
    "problem": {"fg": "red", "bold": True},
}
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


def echo_findings(findings: Sequence[Finding]) -> None:
    """Write findings, one a paragraph, and a summary.

    Args:
        findings: as `examine` gives.
    """
    out = sys.stdout
    width = min(_MAX_WIDTH, shutil.get_terminal_size().columns) if out.isatty() else None
    indent = max(len(finding.title) for finding in findings) + len("problem") + 4
    for finding in findings:
        mark = click.style(f"{finding.status:<7}", **_STYLES[finding.status])
        head = f"{finding.title:<{indent - len('problem') - 2}}"
        click.echo(f"{mark}  {head}{_hang(finding.text, indent, width)}")
        if finding.remedy:
            click.echo(" " * indent + _hang(f"mend: {finding.remedy}", indent, width))
    counts = [
        (sum(finding.status == status for finding in findings), status)
        for status in ("problem", "warning")
    ]
    said = [plural(count, status) for count, status in counts if count]
    worst: Status = "problem" if counts[0][0] else "warning" if counts[1][0] else "ok"
    click.echo()
    click.secho(", ".join(said) if said else "all is well", **_STYLES[worst])


def _hang(text: str, indent: int, width: int | None) -> str:
    if width is None or width - indent < 20:
        return text
    return f"\n{' ' * indent}".join(
        textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    )


def echo_progress(text: str) -> None:
    """Show on a terminal what is being done, in a line that the next call replaces.

    Args:
        text: what; "" when it is over.
    """
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}" + (" ..." if text else ""), nl=False, err=True)
