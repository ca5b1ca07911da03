"""``cellmesh run``: runs a script on ranks as torchrun does, on new ones or on those of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..controller.options import read_project_options, working_directory
from ..magics.options import START_OPTIONS, chosen, read_param
from . import torchrun
from .launch import LEFT_OUT, read_launch


def _hidden_option(name: str) -> click.Option:
    is_flag = name in torchrun.FLAGS
    flag = f"--{name.replace('_', '-')}"
    return click.Option([flag, name], is_flag=is_flag, default=None, hidden=True)


# As the options of magics (`magics.options`).
_OWN = """
-n N: Number of ranks (1).
--nproc-per-node NUMBER: Ranks, as torchrun takes it: auto, gpu, cpu; with --hosts, on each host.
-m, --module: SCRIPT is a module, as in python -m.
--on MESH: Run in the ranks of this living mesh.
--wait (waits): With --on: wait while the mesh is busy.
-i (is_interactive): Then open a shell on the ranks, as python -i.
--keep TIME: Keep the ranks after the script: 30m, 2h.
--watch (watches): Run again at each edit in the project.
--raw (is_raw): Fold no output on a terminal either.
--log-dir DIR: Write one file a rank and stream there, too.
-r, --redirects STREAMS: Streams to write to files only: 1, 2, or 3 for both.
-t, --tee STREAMS: Streams to write to files and show.
--local-ranks-filter RANKS (ranks_filter): Show only these.
--shutdown-timeout TIME: How long ranks may take to end after SIGTERM or SIGHUP (30).
--no-keep-warm: Leave no process for the next run.
"""
_OPTIONS: Sequence[click.Parameter] = (
    *map(read_param, _OWN.strip().splitlines()),
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
