"""The ``cellmesh`` command: lists the meshes of this machine, ends them, and checks the machine."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import IO, Any

import click

from .. import __version__
from ..controller.options import MAX_RANKS
from ..controller.session.living import (
    FoundMesh,
    end,
    find_meshes,
    find_waiting,
    memory_bytes,
    processes_of,
    signal_all,
)
from ..errors import CellmeshError, did_you_mean
from ..wire.marks import end_dead_meshes
from ..wire.own_file import read_own_file
from ..wire.ticket import find_strange, runtime_root
from .rendering import (
    as_json,
    describe_row,
    echo_meshes,
    format_bytes,
    plural,
    printable,
    row_of,
)

TICKET_VARIABLE = "CELLMESH_TICKET"


# The commands in the order of the help; those of other modules, which are imported for them only.
_ORDER = ("start", "shell", "ps", "stop", "doctor", "agent")
_ELSEWHERE = {"shell": "shell.shell", "start": "start.start_command"}


class _Commands(click.Group):
    """Click group that imports commands of other modules when they are needed, and shows a
    `CellmeshError` of its commands as a message without a traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_ORDER]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = _ELSEWHERE[cmd_name].partition(".")
        command: click.Command = getattr(importlib.import_module(f"..{module}", __name__), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CellmeshError as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="cellmesh %(version)s")
def main() -> None:
    """Interactive distributed PyTorch in a notebook: see, end and check meshes from a terminal.

    A mesh is started in a notebook (%load_ext cellmesh, then %dist_start 4) or in a script
    (cellmesh.start(4)).

    \b
    Examples:
      cellmesh doctor         check this machine, and show how to fix problems
      cellmesh ps             the meshes that are running
      cellmesh stop train     end one of them
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and hosts need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")


@main.command()
@click.option("--json", "wants_json", is_flag=True, help="Write JSON, for scripts.")
def ps(wants_json: bool) -> None:
    """List your meshes on this machine.

    Each row shows the mesh's ranks, its mesh dims, the processes of its agent and of its controller
    (the notebook's kernel or the script that holds it; without a controller, the remaining time of
    the lease), its age, and the memory of all its processes together, shared pages counted once.

    Lines below the table name the processes that notebooks keep for their next meshes, and count
    the peers that a mesh's sockets have refused because they had no key of the mesh. The state of a
    mesh on many hosts comes from its agents.

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
            memory = format_bytes(memory_bytes([process]))
            click.echo(f"process {process.pid} waits for the next mesh of its notebook: {memory}")


@main.command()
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
    --all also ends the zygotes that notebooks keep for their next meshes.

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
    signal_all(waiting, signal.SIGTERM)
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
            there = f"running: {', '.join(by_name)}" if by_name else "no mesh is running"
            raise click.ClickException(
                f"there is no mesh {name!r}{did_you_mean(name, by_name)} ({there})"
            )
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


def read_given(
    option: str | None, environment: MutableMapping[str, str], stdin: IO[bytes]
) -> bytes:
    """Read the mesh's ticket from the file, environment variable or standard input that this
    process was given.

    Args:
        option: path of the ticket's file, or ``-`` for standard input; None to use the environment
            or, without a ticket there, standard input.
        environment: environment of this process; the ticket is removed from it, so that no child
            process inherits it.
        stdin: standard input; on a terminal, the user is asked for the ticket, without an echo.

    Returns:
        The ticket's text.

    Raises:
        HostError: the file cannot be read, or others may read it.
        click.UsageError: there is no ticket.
    """
    given = environment.pop(TICKET_VARIABLE, "").strip()
    if option is None and given.startswith("{"):
        return given.encode()
    if option is None and given:
        option = given
    if option not in (None, "-"):
        assert option is not None
        return read_own_file(Path(option).expanduser())
    if option is None and stdin.isatty():
        text = click.prompt("Paste the ticket (it is not shown)", hide_input=True, err=True)
        return str(text).strip().encode()
    text_ = stdin.readline()
    if not text_.strip():
        raise click.UsageError(
            f"there is no ticket: name its file (--ticket FILE), set ${TICKET_VARIABLE} to its "
            "text or file, or write it to standard input"
        )
    return text_


@main.command()
@click.option(
    "--ticket",
    "ticket",
    default=None,
    metavar="FILE",
    help="The ticket that %dist_start has written, mode 0600; - for standard input. By default "
    "$CELLMESH_TICKET, which has its text or names its file, then standard input; a terminal is "
    "asked.",
)
@click.option("--address", default="", help="This host's address for the notebook and other hosts.")
@click.option("--interface", default="", help="The network interface, in place of an address.")
@click.pass_context
def agent(ctx: click.Context, ticket: str | None, address: str, interface: str) -> None:
    """Run this host's part of a mesh on many hosts, until the mesh ends.

    An engine (ssh, srun, torchrun, kubectl exec), or you, run this command once on each host. The
    ticket is secret: it is never an argument.

    \b
    Examples:
      cellmesh agent --ticket ~/cellmesh-train.json
      cellmesh agent          and paste the ticket when asked
    """
    from ..workers.agent.on_host import run

    with open(0, "rb", buffering=0, closefd=False) as stdin:
        text = read_given(ticket, os.environ, stdin)
        ctx.exit(run(text, stdin, address, interface))


@main.command()
@click.option(
    "-n",
    "--ranks",
    "num_ranks",
    type=click.IntRange(1, MAX_RANKS),
    metavar="N",
    help="How many ranks you mean to run here; by default one a GPU, or one a core.",
)
@click.option(
    "--no-start", is_flag=True, help="Do not start a mesh of 2 ranks to see that it works."
)
@click.option("--json", "wants_json", is_flag=True, help="Write the findings as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    num_ranks: int | None,
    no_start: bool,
    wants_json: bool,
) -> None:
    """Check whether meshes can run on this machine, and show how to fix problems.

    Checks the causes of failed starts: torch and its backends, GPUs, memory and directories; then
    starts a mesh of 2 ranks.
    Nothing is changed, except that remaining processes of a mesh whose agent was killed are ended.
    The exit code is 1 if there is a problem, else 0; a warning is no problem.

    \b
    Examples:
      cellmesh doctor
      cellmesh doctor -n 64           is there enough for 64 ranks?
      cellmesh doctor --json --no-start
    """
    from .doctor import echo_findings, examine

    end_dead_meshes(runtime_root())
    findings = [*examine(num_ranks, not no_start)]
    if wants_json:
        click.echo(as_json({"version": __version__, "findings": findings}))
    else:
        echo_findings(findings)
    if any(finding.status == "problem" for finding in findings):
        ctx.exit(1)
