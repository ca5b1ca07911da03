"""``cellmesh run``: runs a script on ranks as torchrun does, on new ones or on those of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..controller.options import read_project_options, working_directory
from ..magics.options import START_OPTIONS, chosen
from . import torchrun
from .launch import LEFT_OUT, read_launch


def _hidden_option(name: str) -> click.Option:
    is_flag = name in torchrun.FLAGS
    flag = f"--{name.replace('_', '-')}"
    return click.Option([flag, name], is_flag=is_flag, default=None, hidden=True)


_OPTIONS: Sequence[click.Parameter] = (
    click.Option(["-n", "n"], type=int, metavar="N", help="Number of ranks (1)."),
    click.Option(
        ["--nproc-per-node"],
        metavar="N|auto|gpu|cpu",
        help="Number of ranks, as torchrun takes it; with --hosts or --launch, on each host.",
    ),
    click.Option(["-m", "--module"], is_flag=True, help="SCRIPT is a module, as in python -m."),
    click.Option(["--on"], metavar="NAME", help="Run in the ranks of this living mesh."),
    click.Option(["--wait", "waits"], is_flag=True, help="With --on: wait while the mesh is busy."),
    click.Option(
        ["-i", "is_interactive"], is_flag=True, help="Then open a shell on the ranks, as python -i."
    ),
    click.Option(["--keep"], metavar="TIME", help="Keep the ranks after the script: 30m, 2h."),
    click.Option(
        ["--watch", "watches"], is_flag=True, help="Run again at each edit in the project."
    ),
    click.Option(["--raw", "is_raw"], is_flag=True, help="Fold no output on a terminal either."),
    click.Option(["--log-dir"], metavar="DIR", help="Write one file a rank and stream there, too."),
    click.Option(
        ["-r", "--redirects"], metavar="1|2|3", help="Streams to write to files only: 3 is both."
    ),
    click.Option(["-t", "--tee"], metavar="1|2|3", help="Streams to write to files and show."),
    click.Option(
        ["--local-ranks-filter", "ranks_filter"],
        metavar="RANKS",
        help="Show only these.",
    ),
    click.Option(
        ["--shutdown-timeout", "grace_s"],
        type=float,
        metavar="SECONDS",
        help="How long ranks may take to end after SIGTERM or SIGHUP (30).",
    ),
    click.Option(["--no-keep-warm"], is_flag=True, help="Leave no process for the next run."),
    *(param for param in START_OPTIONS if param.name not in LEFT_OUT),
    *map(_hidden_option, torchrun.UNSEEN),
    click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]..."),
)


@click.command(
    "run",
    params=[*_OPTIONS],
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)
@click.pass_context
def run(ctx: click.Context, /, words: tuple[str, ...], **given: Any) -> None:
    """Run a script on ranks, in place of torchrun; options precede SCRIPT.

    The script gets new processes in which torch is imported already: they are forked from one that
    waits for ten minutes after the last run. torchrun's options are accepted where they mean the
    same. The exit status is that of the rank that failed first, 128 + n after signal n.

    \b
    Examples:
      cellmesh run -n 4 train.py --lr 0.1
      cellmesh run --nproc-per-node gpu -m package.train
      cellmesh run -n 4 --keep 30m train.py       then: cellmesh shell NAME
      cellmesh run --on dev train.py              in the ranks of `cellmesh start 4 --name dev`
    """
    from .execution import execute

    ctx.exit(execute(read_launch(words, chosen(given), read_project_options(working_directory()))))
