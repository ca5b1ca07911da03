"""``cellmesh start``: starts a mesh that lives under its lease, without a controller."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..controller.options import read_project_options, working_directory
from ..controller.output.console import ConsoleSink
from ..controller.session.alike import describe_ready
from ..controller.session.launch.prestart import shell_prestart
from ..controller.session.life import show_progress
from ..controller.session.living import look_at
from ..controller.session.start import NOTEBOOK_LEASE_S, read_options, start_from
from ..errors import MeshUsageError
from ..magics.options import START_OPTIONS, chosen
from ..wire.host import format_span
from ..wire.ticket import read_ticket, runtime_root
from .rendering import as_json, describe_row, row_of


@click.command("start", params=[*START_OPTIONS])
@click.option("--json", "wants_json", is_flag=True, help="Write JSON, as of `cellmesh ps --json`.")
def start_command(num_ranks: int | None, wants_json: bool, **given: Any) -> None:
    """Start a mesh that lives on without a terminal or notebook, until its lease ends.

    The lease (30 min, or --lease) is counted while nothing is attached to the mesh. NUM_RANKS may
    be left out where --mesh, --hosts or the project's pyproject.toml gives the number.

    \b
    Examples:
      cellmesh start 8 --name dev --mesh dp=2,tp=4 --lease 8h
      cellmesh exec dev 'print(rank)'
      cellmesh shell dev
      cellmesh stop dev
    """
    folder = working_directory()
    lease_s = read_project_options(folder).get("lease_s", NOTEBOOK_LEASE_S)
    options = {"lease_s": lease_s, **chosen(given)}
    if read_options({"num_ranks": num_ranks, **options}).lease_s <= 0:
        raise MeshUsageError("a mesh that nothing is attached to needs a lease, like --lease 30m")
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)  # as in a notebook; here it is the folder of this command
    sink, prestart = ConsoleSink(), shell_prestart()
    show = None if wants_json else show_progress(sink)
    mesh = start_from(prestart, num_ranks, on_progress=show, **options)
    if prestart is not None:
        prestart.leave_one()
    ready, ticket = describe_ready(mesh), mesh.rank_set.session.ticket
    mesh.detach()
    if wants_json:
        found = look_at(read_ticket(ticket.path), runtime_root())
        click.echo(as_json(describe_row(row_of(found))))
        return
    name = mesh.name
    sink.status(
        f"{name}: {ready}; lives for {format_span(ticket.lease_s)} unattended: "
        f"`cellmesh exec {name} 'print(rank)'`, `cellmesh shell {name}`, `%dist_attach {name}` in "
        f"a notebook, `cellmesh stop {name}`",
        True,
    )
