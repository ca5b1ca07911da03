"""The magics' options, declared with click; `line` reads them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from ..wire.options import Flag, StartOptions, Switch
from .completion import meanings
from .completion.meanings import Rank, Text


def _start_option(name: str, kind: Any, flag: Flag) -> click.Option:
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
        _start_option(name, *get_args(hint))
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


def _command(name: str, summary: str, example: str, *params: click.Parameter) -> click.Command:
    help_text = f"{summary}\n\n\b\nExample:\n{example}"
    return click.Command(name, params=list(params), help=help_text, add_help_option=False)


_RANKS = click.Option(
    ["--ranks"], type=Text(meanings.rank_set), metavar="SET", help="Ranks, like 0,2-3."
)
_AT = click.Option(
    ["--at"],
    type=Text(meanings.coordinate),
    metavar="COORD",
    help="A mesh coordinate, like tp=0 or dp=1,tp=0.",
)

_ARGV = click.Option(
    ["--argv"],
    metavar="ARGUMENTS",
    help="What sys.argv has behind the program's name in this cell, in quotes, like '--lr 0.1'.",
)

COMMANDS = {
    command.name: command
    for command in (
        _command(
            "dist_start",
            "Start a mesh of persistent ranks on this machine.",
            "  %dist_start 8 --mesh dp=2,tp=4",
            *START_OPTIONS,
        ),
        _command(
            "dist",
            "Run this cell on the ranks.",
            "  %%dist --ranks 0,2-3\n  print(rank)",
            _RANKS,
            _AT,
            click.Option(
                ["--nowait"],
                is_flag=True,
                help="Return a Run at once; output is shown here when it is printed.",
            ),
            click.Option(["-q", "--quiet"], is_flag=True, help="Show nothing but errors."),
            click.Option(
                ["--time", "timed"],
                is_flag=True,
                help="Tell how long each rank took, and which one the others waited for.",
            ),
            _ARGV,
        ),
        _command(
            "dist_profile",
            "Run this cell on the ranks under torch.profiler; show where time went on each rank.",
            "  %%dist_profile -o trace.json\n  train_step()",
            _RANKS,
            _AT,
            click.Option(
                ["-o", "--output", "trace"],
                type=Text(meanings.file),
                metavar="FILE",
                help="Write one Chrome trace, for chrome://tracing or "
                "Perfetto: a process for each rank.",
            ),
            click.Option(
                ["--rows", "num_rows"],
                type=click.IntRange(1),
                default=10,
                show_default=True,
                help="How many operators of each kind the tables have.",
            ),
            _ARGV,
        ),
        _command(
            "dist_auto",
            "Run every cell on the ranks from here on; %%local and %dist... cells stay here.",
            "  %dist_auto on",
            click.Argument(["switch"], type=click.Choice(["on", "off"])),
        ),
        _command("local", "Run this cell in the notebook's own process.", "  %%local\n  import os"),
        _command(
            "dist_mesh",
            "Give `mesh` on every rank other dims; without dims, show them.",
            "  %dist_mesh dp=2 tp=4",
            click.Argument(["dims"], nargs=-1, type=Text(meanings.dims)),
        ),
        _command(
            "dist_push",
            "Copy values of the notebook to the ranks, under the same names.",
            "  %dist_push batch lr",
            click.Argument(["names"], nargs=-1, required=True, type=Text(meanings.notebooks_names)),
            click.Option(
                ["--shard"], type=int, metavar="DIM", help="Give each rank a part, along this dim."
            ),
            click.Option(
                ["--placements"],
                metavar="LIST",
                help='Make DTensors: "Shard(0), Replicate()", one for each dim of the mesh.',
            ),
            _RANKS,
        ),
        _command(
            "dist_pull",
            "Bring a value from the ranks into the notebook.",
            "  %dist_pull loss --all",
            click.Argument(["expression"], nargs=-1, required=True, type=Text(meanings.expression)),
            click.Option(["--rank"], type=Rank(), help="Whose; 0 by default."),
            click.Option(
                ["--all"], is_flag=True, help="All ranks' values, as Results (rank -> value)."
            ),
            click.Option(["--gather"], is_flag=True, help="All ranks' parts, put together."),
            click.Option(
                ["--reduce"],
                type=click.Choice(["mean", "sum", "stack"]),
                help="Of all ranks' values.",
            ),
            click.Option(
                ["--dim"],
                type=int,
                default=0,
                show_default=True,
                help="Along which plain parts are gathered.",
            ),
            click.Option(["--as", "target"], metavar="NAME", help="Bind it to this name."),
        ),
        _command(
            "dist_inspect",
            "Describe a value on every rank: shape, dtype, placements, statistics, replicas equal "
            "or not.",
            "  %dist_inspect model.weight",
            click.Argument(["expression"], nargs=-1, required=True, type=Text(meanings.expression)),
            _RANKS,
            click.Option(["--watch"], is_flag=True, help="Look again after each cell."),
            click.Option(
                ["--follow"],
                is_flag=True,
                help="Look again once a second while a cell runs; values "
                "may be torn: the rank goes on.",
            ),
            click.Option(
                ["--grads"], is_flag=True, help="The gradients of a model, layer by layer."
            ),
        ),
        _command(
            "dist_who",
            "Show the ranks' names: types, shapes, sizes, and where they differ between ranks.",
            "  %dist_who",
            click.Argument(["pattern"], required=False, type=Text(meanings.names)),
            _RANKS,
        ),
        _command(
            "dist_status",
            "Show each rank: process, device, what it is doing, memory.",
            "  %dist_status --live",
            click.Option(["--live"], is_flag=True, help="A dashboard that goes on, with buttons."),
            click.Option(
                ["--debug"],
                is_flag=True,
                help="Below, the last hundred steps of recoveries, and of runs that failed or were "
                "interrupted.",
            ),
        ),
        _command(
            "dist_timeline",
            "Show when each rank computed, and when it waited in which collective, in the last "
            "cells.",
            "  %dist_timeline --cells 3",
            click.Option(
                ["--cells", "num_cells"],
                type=click.IntRange(1),
                default=5,
                show_default=True,
                help="How many of the last cells.",
            ),
            click.Option(
                ["-o", "--output", "trace"],
                type=Text(meanings.file),
                metavar="FILE",
                help="Write a Chrome trace as well.",
            ),
            _RANKS,
        ),
        _command(
            "dist_plot",
            "Plot numbers that ranks report with `cellmesh.log(loss=..., step=...)`, also while a "
            "cell runs.",
            "  %dist_plot loss",
            click.Argument(["names"], nargs=-1, required=True, type=Text(meanings.numbers)),
            click.Option(
                ["--mean"], is_flag=True, help="The ranks' mean, and a band from least to most."
            ),
            _RANKS,
        ),
        _command(
            "dist_mem",
            "Show each rank's memory: now, its peak, and the change that the last cell "
            "made.\n\n`memory` is what is resident (RSS) of the rank's process; pages that ranks "
            "share, like torch's code and what was imported before they were forked, count in "
            "each. `peak` is the most since the rank began; `peak rose by` is of the last "
            "cell's own peak, where it was a new one. Memory that is freed may stay with the "
            "process. On a GPU: what torch's allocator has given to tensors, the most of that "
            "since the rank began or torch.cuda.reset_peak_memory_stats(), what it holds of the "
            "GPU, and the last cell's change of what is allocated. Calls from Python are no cells.",
            "  %dist_mem",
            _RANKS,
        ),
        _command(
            "dist_logs",
            "Show the end of all that ranks have printed, also what was too much for the notebook.",
            "  %dist_logs 3 --lines 200",
            click.Argument(["ranks"], required=False, type=Text(meanings.rank_set)),
            click.Option(
                ["--lines"], type=click.IntRange(1), default=50, show_default=True, help="How much."
            ),
        ),
        _command(
            "dist_interrupt",
            "Interrupt what the ranks run; a second time within 5 s, kill and replace what did "
            "not stop.",
            "  %dist_interrupt",
            _RANKS,
        ),
        _command(
            "dist_heal",
            "Replace dead ranks and rebuild the process groups; living ranks keep everything.",
            "  %dist_heal --from 0",
            click.Option(
                ["--from", "source"],
                type=Rank(),
                metavar="RANK",
                help="Copy this rank's names to ranks that are new, as far as they can be copied.",
            ),
            click.Option(
                ["--hosts"],
                metavar="HOSTS",
                help="Put these hosts in the places of lost ones: c:4, or c for the ranks of any.",
            ),
        ),
        _command(
            "dist_resize",
            "Give the mesh another number of ranks, between cells: the highest end, or new ones "
            "follow.\n\nRanks that stay keep their process and their names. What holds groups of "
            "the old size (DTensors, models in DDP or FSDP) must be made again: %dist_save before "
            "and %dist_load after carry its values over.",
            "  %dist_resize 6 --mesh dp=3,tp=2\n  %dist_resize 6 --hosts c:2",
            click.Argument(["num_ranks"], type=int, required=False),
            click.Option(
                ["--mesh"],
                type=Text(meanings.dims),
                metavar="DIMS",
                help="Dims of the DeviceMesh then, like dp=3,tp=2.",
            ),
            click.Option(
                ["--hosts"], metavar="HOSTS", help="New ranks run on these hosts, which join: c:2."
            ),
        ),
        _command(
            "dist_stacks",
            "Show where every rank is: its Python stack, also while it is blocked.",
            "  %dist_stacks 3",
            click.Argument(["ranks"], required=False, type=Text(meanings.rank_set)),
            click.Option(
                ["--all", "all_threads"], is_flag=True, help="All threads, not only the main one."
            ),
            click.Option(
                ["--native"], is_flag=True, help="C and C++ frames as well (needs py-spy)."
            ),
        ),
        _command(
            "dist_why",
            "Say why nothing goes on: operations of ranks that can never meet, or who waits for "
            "whom.",
            "  %dist_why",
        ),
        _command(
            "dist_check",
            "Check that what should be equal on ranks is: parameters, buffers, optimizers, RNG "
            "state.",
            "  %dist_check model",
            click.Argument(["expression"], nargs=-1, type=Text(meanings.expression)),
            _RANKS,
        ),
        _command(
            "dist_sync",
            "Make replicas equal again.",
            "  %dist_sync model --from 0",
            click.Argument(["expression"], nargs=-1, required=True, type=Text(meanings.expression)),
            click.Option(
                ["--from", "source"],
                type=Rank(),
                default=0,
                show_default=True,
                help="The rank that is right.",
            ),
        ),
        _command(
            "dist_seed",
            "Seed the generators of random, numpy and torch on all ranks: alike, or each with its "
            "rank more.",
            "  %dist_seed 0",
            click.Argument(["seed"], type=click.IntRange(0)),
            click.Option(
                ["--per-rank"], is_flag=True, help="Seed each rank with the seed plus its rank."
            ),
        ),
        _command(
            "dist_reload",
            "Reload modules of yours on the ranks whose files have changed; objects go on with the "
            "new code.\n\nAs IPython's %autoreload does. With on, ranks do so before each cell; on "
            "many hosts, these have the notebook's files.",
            "  %dist_reload\n  %dist_reload on",
            click.Argument(["switch"], required=False, type=click.Choice(["on", "off"])),
        ),
        _command(
            "dist_export",
            "Write what ran on the ranks, in its order, as a script for torchrun.",
            "  %dist_export train.py",
            click.Argument(["path"], metavar="FILE", type=Text(meanings.file)),
            click.Option(["--force"], is_flag=True, help="Overwrite the file."),
            click.Option(
                ["--locals", "with_locals"],
                is_flag=True,
                help="Run the notebook's own cells, too, on rank 0.",
            ),
        ),
        _command(
            "dist_save",
            "Save names of the ranks as one checkpoint (torch.distributed.checkpoint), whole or "
            "not at all.",
            "  %dist_save model optimizer step runs/latest",
            click.Argument(
                ["names"],
                nargs=-1,
                required=True,
                metavar="NAME... PATH",
                type=Text(meanings.names_and_file),
            ),
        ),
        _command(
            "dist_load",
            "Load a checkpoint into the names it was saved from, in place; on any number of ranks.",
            "  %dist_load model optimizer runs/latest",
            click.Argument(
                ["names"],
                nargs=-1,
                required=True,
                metavar="[NAME...] PATH",
                type=Text(meanings.names_and_file),
            ),
            _RANKS,
        ),
        _command(
            "dist_debug",
            "Open the debugger where a rank's last exception was raised.",
            "  %dist_debug --ranks 3",
            click.Argument(
                ["ranks_argument"], required=False, metavar="[RANKS]", type=Text(meanings.rank_set)
            ),
            _RANKS,
        ),
        _command(
            "dist_attach",
            "Find a living mesh again, after this kernel or another one has left it.",
            "  %dist_attach",
            click.Argument(["name"], required=False, type=Text(meanings.meshes)),
            click.Option(["--steal"], is_flag=True, help="Take it from who holds it."),
        ),
        _command(
            "dist_detach",
            "Leave the mesh; it lives on until its lease ends, and %dist_attach finds it again.",
            "  %dist_detach",
        ),
        _command(
            "dist_restart",
            "Replace all ranks by new ones, with the notebook's environment and directory of now; "
            "what they held is gone.",
            "  %dist_restart",
        ),
        _command(
            "dist_stop",
            "End the mesh and everything in it; with a name, a mesh that no process holds.",
            "  %dist_stop",
            click.Argument(["name"], required=False, type=Text(meanings.meshes)),
        ),
    )
}
