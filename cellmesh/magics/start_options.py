"""The options of %dist_start, made for click from their one description (`StartOptions`)."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from ..wire.options import Flag, StartOptions, Switch


def _option(name: str, kind: Any, flag: Flag) -> click.Option:
    declared = flag.name or "--" + name.removesuffix("_s").replace("_", "-")
    kinds: dict[Any, Any] = {int: int, Switch: click.Choice(["on", "off"])}
    is_choice = get_origin(kind) is Literal
    return click.Option(
        [declared, name],
        type=click.Choice(get_args(kind)) if is_choice else kinds.get(kind),
        is_flag=kind is bool,
        default=None,
        multiple=flag.is_repeated,
        metavar=flag.metavar or None,
        help=flag.help,
    )


START_OPTIONS: tuple[click.Parameter, ...] = (
    click.Argument(["num_ranks"], type=int, required=False),
    *(
        _option(name, *get_args(hint))
        for name, hint in get_type_hints(StartOptions, include_extras=True).items()
        if get_args(hint) and isinstance(get_args(hint)[-1], Flag)
    ),
    click.Option(
        ["--fresh"],
        is_flag=True,
        default=None,
        help="End a mesh of this notebook that runs, and start a new one.",
    ),
)
