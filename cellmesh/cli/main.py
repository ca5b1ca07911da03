"""The ``cellmesh`` command: starts, uses, lists and ends meshes, and checks the machine."""

from __future__ import annotations

import importlib
import io
import os
import signal
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
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # during imports, by `__main__`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CellmeshError as error:
            from ..controller.output.console import in_terminal

            raise click.ClickException(in_terminal(str(error))) from error
        except click.UsageError as error:  # in one line, without the usage above it
            path = error.ctx.command_path if error.ctx is not None else "cellmesh"
            message = f"{error.format_message()} ({path} --help shows the options)"
            raise click.UsageError(message) from None
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None  # 128 + SIGINT, as of a shell's command


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="cellmesh %(version)s")
def main() -> None:
    """Interactive distributed PyTorch: run scripts, and use, see and end meshes from a terminal.

    \b
    Examples:
      cellmesh run -n 4 train.py --lr 0.1   in place of torchrun, on ranks that are there at once
      cellmesh start 4 --name dev           a mesh that lives on by itself
      cellmesh shell dev                    type on its ranks; %dist_attach dev in a notebook
      cellmesh exec dev 'print(rank)'       run one cell on them
      cellmesh ps                           the meshes that are running
      cellmesh stop dev                     end one of them
      cellmesh doctor                       check this machine, and show how to fix problems
    """
    for number in range(3):  # else the next socket or file would be standard output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and hosts need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
