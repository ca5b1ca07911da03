"""``cellmesh ps`` and ``stop``: list the meshes of this user on this machine, and end them."""

from __future__ import annotations

import click

from ..controller.session.living import (
    FoundMesh,
    describe_waiting,
    end,
    end_waiting,
    find_meshes,
    find_waiting,
    memory_bytes,
    missing,
    processes_of,
)
from ..errors import CellmeshError
from ..wire.segments import format_bytes
from ..wire.ticket import find_strange, runtime_root
from .rendering import (
    as_json,
    describe_row,
    echo_meshes,
    plural,
    printable,
    row_of,
)


@click.command()
@click.option("--json", "wants_json", is_flag=True, help="Write JSON, for scripts.")
def ps(wants_json: bool) -> None:
    """List your meshes on this machine.

    Each row shows the mesh's ranks, its mesh dims, the processes of its agent and of its controller
    (the notebook's kernel or the script that holds it; without a controller, the remaining time of
    the lease), its age, and the memory of all its processes together, shared pages counted once.

    Lines below the table name the processes that wait for the next mesh of a notebook or the next
    `cellmesh run`, and count the peers that a mesh's sockets have refused because they had no key
    of the mesh. The state of a mesh on many hosts comes from its agents.

    If a mesh is dead after a crash, the command ends its remaining processes, removes its files,
    and reports this.

    \b
    Examples:
      cellmesh ps
      cellmesh ps --json | jq -r '.[].name'
    """
    found = find_meshes(runtime_root())
    problems = [why for _, why in find_strange(runtime_root())]
    for mesh in found:
        if mesh.state == "dead":
            try:
                end(mesh)
            except CellmeshError as error:
                problems.append(str(error))
    rows = [row_of(mesh) for mesh in found]
    if wants_json:
        click.echo(as_json([describe_row(row) for row in rows]))
    else:
        echo_meshes(rows, problems)
        for process in find_waiting(runtime_root()):
            aim, memory = describe_waiting(process, runtime_root())
            click.echo(f"process {process.pid} waits for {aim}: {format_bytes(memory)}")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--all",
    "wants_all",
    is_flag=True,
    help="Stop all your meshes on this machine, and what waits for more.",
)
def stop(names: tuple[str, ...], wants_all: bool) -> None:
    """Stop meshes: end all their processes and remove their files.

    All values in the ranks' memory are lost. The notebook keeps running and may start another mesh.
    --all also ends the zygotes that wait for the next meshes of notebooks and shells.

    \b
    Examples:
      cellmesh stop train
      cellmesh stop --all
    """
    if wants_all == bool(names):
        raise click.UsageError("name the meshes to stop, or say --all (`cellmesh ps` lists them)")
    found = [mesh for mesh in find_meshes(runtime_root()) if mesh.state != "elsewhere"]
    waiting = find_waiting(runtime_root()) if wants_all else []
    if wants_all and not (found or waiting):
        click.echo("no mesh is running")
    end_waiting(waiting)
    for process in waiting:
        click.echo(f"stopped process {process.pid}, which waited for the next mesh")
    failures = []
    for mesh in found if wants_all else _choose(names, found):
        try:
            _stop(mesh)
        except CellmeshError as error:  # the others are stopped all the same
            failures.append(printable(str(error)))
        except Exception as error:  # of a ticket's values
            failures.append(printable(f"{mesh.ticket.name}: {type(error).__name__}: {error}"))
    if failures:
        raise click.ClickException("\n".join(failures))


def _choose(names: tuple[str, ...], found: list[FoundMesh]) -> list[FoundMesh]:
    by_name: dict[str, list[FoundMesh]] = {}
    for mesh in found:  # this host may run several agents of one mesh
        by_name.setdefault(mesh.ticket.name, []).append(mesh)
    for name in names:
        if name not in by_name:
            raise missing(name, by_name)
    return [mesh for name in dict.fromkeys(names) for mesh in by_name[name]]


def _stop(mesh: FoundMesh) -> None:
    ticket, name = mesh.ticket, printable(mesh.name)
    processes = processes_of(ticket) if mesh.is_living else []
    where = plural(len(processes), "process")
    if ticket.spans_hosts:
        where = f"on {', '.join(agent.name for agent in ticket.agents)}"
    memory = format_bytes(memory_bytes(processes))
    how = "stopped" if end(mesh) else "killed"
    if mesh.state == "dead":
        click.echo(f"removed what was left of {name}, which was dead")
    else:
        ranks = plural(ticket.num_ranks, "rank")
        click.echo(printable(f"{how} {name}: {ranks}, {where}, {memory}"))
