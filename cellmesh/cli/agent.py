"""``cellmesh agent``: runs a host's part of a mesh on many hosts."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import IO

import click

from ..wire.own_file import read_own_file

TICKET_VARIABLE = "CELLMESH_TICKET"


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


@click.command()
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
