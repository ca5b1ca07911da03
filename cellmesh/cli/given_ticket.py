"""Finds the ticket of `cellmesh agent`: in a file, the environment, standard input, a prompt."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import IO

import click

from ..wire.own_file import read_own_file

VARIABLE = "CELLMESH_TICKET"


def read_given(
    option: str | None, environment: MutableMapping[str, str], stdin: IO[bytes]
) -> tuple[bytes, bool]:
    """Read the ticket that this process was given.

    Args:
        option: a file, or ``-`` for standard input; None if it is elsewhere.
        environment: of this process; the ticket is removed, so that nothing inherits it.
        stdin: standard input; a terminal is asked, without an echo.

    Returns:
        The ticket's text, and whether standard input goes on with orders.

    Raises:
        HostError: the file cannot be read, or others may read it.
        click.UsageError: there is no ticket.
    """
    given = environment.pop(VARIABLE, "").strip()
    if option is None and given.startswith("{"):
        return given.encode(), False
    if option is None and given:
        option = given
    if option not in (None, "-"):
        assert option is not None
        return read_own_file(Path(option).expanduser()), False
    if option is None and stdin.isatty():
        text = click.prompt("Paste the ticket (it is not shown)", hide_input=True, err=True)
        return str(text).strip().encode(), False
    text_ = stdin.readline()
    if not text_.strip():
        raise click.UsageError(
            f"there is no ticket: name its file (--ticket FILE), set ${VARIABLE} to its text or "
            "file, or write it to standard input"
        )
    return text_, True
