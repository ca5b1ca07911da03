"""Runs scripts on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..wire.messages import Signal
from ..wire.verbs import RunScript
from .core.requests import control
from .output.printer import Printer
from .rank_set import RankSet
from .run import Run


def submit_script(
    rank_set: RankSet,
    path: str,
    argv: Sequence[str] = (),
    *,
    is_module: bool = False,
    is_shared: bool = False,
    keeps: bool = False,
    is_terminal: bool = False,
    printer: Printer | None = None,
) -> Run[Any]:
    """Run a script on ranks as their ``__main__``, without waiting for its end.

    Args:
        rank_set: the ranks.
        path: path of the script, or name of the module, as in `RunScript`.
        argv: arguments of the script.
        is_module, is_shared, keeps, is_terminal: as in `RunScript`.
        printer: shows the output; None for the calling notebook cell or the console.

    Raises:
        NoMeshError: the mesh has ended.
        RankDied: one of the ranks is dead.
    """
    work = RunScript(0, path, tuple(argv), is_module, is_shared, keeps, is_terminal)
    return rank_set.start(work, path if is_module else Path(path).name, printer=printer)


def signal_ranks(rank_set: RankSet, number: int) -> None:
    """Send a signal to the processes of ranks, whose handlers handle it."""
    verb, ranks = Signal(number), rank_set.living()
    rank_set.session.runs.post_if_open(lambda core, now: [control(ranks, verb)])
