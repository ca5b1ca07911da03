"""The ``cellmesh`` command: lists the meshes of this machine, ends them, and checks the machine."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

import click

from .. import __version__
from ..errors import CellmeshError

_ACTS = ("status", "stacks", "logs", "interrupt", "heal", "pull")
# The commands in the order of the help, each with its module, which is imported for it only.
_COMMANDS = {
    "run": "run.run",
    "start": "start.start_command",
    "shell": "shell.shell",
    "exec": "remote.exec_command",
    **{name: f"remote.{name}" for name in _ACTS},
    "ps": "meshes.ps",
    "stop": "meshes.stop",
    "doctor": "doctor.doctor",
    "agent": "agent.agent",
}


class _Commands(click.Group):
    """Click group that imports its commands when they are needed, and shows a `CellmeshError` of
    theirs as a message without a traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(".")
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
      cellmesh run -n 4 train.py     a script, in place of torchrun
      cellmesh doctor         check this machine, and show how to fix problems
      cellmesh ps             the meshes that are running
      cellmesh stop train     end one of them
    """
    for number in range(3):  # else the next socket or file would be standard output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and hosts need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
