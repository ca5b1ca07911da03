"""``cellmesh shell``: IPython in a terminal, whose lines run on the ranks of a living mesh."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import click
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.terminal.ipapp import TerminalIPythonApp
from IPython.terminal.prompts import Prompts
from pygments.token import Token  # type: ignore[import-untyped]
from traitlets.config import Config

from ..controller.mesh import Mesh
from ..controller.session.attach import attach, find_mesh
from ..errors import CellmeshError, MeshUsageError
from ..magics.commands import Commands
from ..magics.extension import load
from ..wire.host import format_span
from ..wire.ranks import format_ranks


class _Prompts(Prompts):
    """IPython's prompts, after the mesh and the ranks that a line runs on.

    Args:
        shell: the shell.
        commands: its magics.
    """

    def __init__(self, shell: TerminalInteractiveShell, commands: Commands) -> None:
        super().__init__(shell)
        self._commands = commands

    def in_prompt_tokens(self) -> list[tuple[Any, str]]:
        commands, place = self._commands, ""
        with contextlib.suppress(CellmeshError):
            if commands.is_auto and commands.mesh is not None and commands.mesh.alive:
                place = f"{commands.mesh.name} [{format_ranks(commands.auto_ranks().ranks)}] "
        return [(Token.Prompt, place), *super().in_prompt_tokens()]  # type: ignore[no-untyped-call]


def _leave(lines: list[str]) -> list[str]:
    """Have ``exit`` and ``quit`` leave the shell: on ranks, they would end the cell."""
    is_exit = "".join(lines).strip().removesuffix("()") in ("exit", "quit")
    return ["%%local\n", "get_ipython().ask_exit()\n"] if is_exit else lines


_leave.has_side_effects = True  # type: ignore[attr-defined]


def run_shell(mesh: Mesh, chosen: Mapping[str, str | None] = {}, banner: str = "") -> None:
    """Open IPython in this process's terminal, with lines that run on ranks; return once the user
    leaves it. The mesh is neither ended nor left.

    Args:
        mesh: a mesh that this process controls.
        chosen: ``ranks`` or ``at``: the ranks to run on, as the options of ``%dist_auto``.
        banner: text to show first; "" for a line on the mesh.

    Raises:
        MeshUsageError: the mesh has no such ranks.
    """
    config = Config()
    config.TerminalInteractiveShell.confirm_exit = False
    config.TerminalIPythonApp.display_banner = False
    app: Any = TerminalIPythonApp.instance(config=config)
    app.initialize([])
    commands = load(app.shell, tells=False)
    commands.adopt(mesh)
    app.shell.prompts = _Prompts(app.shell, commands)
    app.shell.input_transformers_cleanup.insert(0, _leave)
    print(banner or "; ".join(map(str, [mesh, *mesh.runs])))
    commands.dist_auto({"switch": "on", "ranks": None, "at": None, **chosen})
    app.start()


@click.command()
@click.argument("name", required=False)
@click.option("--ranks", metavar="SET", help="Run on these ranks, like 0,2-3.")
@click.option("--at", metavar="COORD", help="Run at a mesh coordinate, like tp=0.")
@click.option("--steal", is_flag=True, help="Take the mesh from a process that holds it.")
def shell(name: str | None, ranks: str | None, at: str | None, steal: bool) -> None:
    """Open IPython in this terminal, whose lines run on the ranks of a mesh.

    NAME may be left out where one mesh lives. The shell has the notebook's magics, completion and
    history. Ctrl-C interrupts the ranks; `exit` or Ctrl-D leaves the mesh, which lives on until its
    lease ends.

    \b
    Examples:
      cellmesh shell train
      cellmesh shell train --ranks 0
    """
    found = find_mesh(name).name
    if not sys.stdin.isatty():
        raise MeshUsageError(
            f"a shell needs a terminal: `cellmesh exec {found} -` runs standard input"
        )
    mesh = attach(found, steal=steal)
    try:
        run_shell(mesh, {"ranks": ranks, "at": at})
    finally:
        _detach(mesh)


def _detach(mesh: Mesh) -> None:
    """Leave a mesh, and say how to return to it; end one without a lease."""
    lease_s = mesh.rank_set.session.ticket.lease_s
    if not mesh.alive:
        return
    if lease_s <= 0:
        mesh.stop()
        click.echo(f"{mesh.name} had no lease, and has ended")
        return
    mesh.detach()
    click.echo(
        f"{mesh.name} lives on for {format_span(lease_s)}: `cellmesh shell {mesh.name}` returns to "
        f"it, `cellmesh stop {mesh.name}` ends it"
    )
