"""What a rank's main thread is doing, seen from its control thread."""

from __future__ import annotations

import sys
import threading
import types
from dataclasses import dataclass

from .shell import RankShell

# Files of torch whose outermost frame is what the user called, and names in them that only wrap.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_WRAPPERS = frozenset({"wrapper", "_wrapper", "make_watched"})


@dataclass(frozen=True)
class Activity:
    """The interesting facts of a stack.

    Attributes:
        execution_count: the cell that runs (0: unknown).
        line: its line (0: unknown).
        where: innermost function, with its module.
        collective: the ``torch.distributed`` call it is in, "" if none.
    """

    execution_count: int
    line: int
    where: str
    collective: str


def look_at_main_thread(shell: RankShell) -> Activity:
    """Read the main thread's stack.

    Args:
        shell: knows which files are cells.

    Returns:
        Where it is. It may have moved on by the time the caller reads this.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _read(frame, shell)


def describe_interruption(tb: types.TracebackType | None, handled: BaseException | None = None) -> str:
    """Where a KeyboardInterrupt struck, in a few words: a collective, or the innermost function.

    Args:
        tb: its traceback.
        handled: what was being handled then: the collective may just have raised, freed by its peers' end.
    """
    collective, where = _places(tb)
    if handled is not None and not collective:
        collective, _ = _places(handled.__traceback__)
    return f"interrupted in {collective or where}".replace("<module>", "the cell")


def _places(tb: types.TracebackType | None) -> tuple[str, str]:
    """The collective that a traceback passes through, and its innermost function that is the user's."""
    collective = where = ""
    while tb is not None:
        code = tb.tb_frame.f_code
        if not collective and _is_collective(code):
            collective = code.co_name
        if not str(tb.tb_frame.f_globals.get("__name__", "")).startswith("cellmesh.workers."):
            where = code.co_name
        tb = tb.tb_next
    return collective, where


def _is_collective(code: types.CodeType) -> bool:
    return code.co_filename.endswith(_COLLECTIVES) and code.co_name not in _WRAPPERS


def _read(frame: types.FrameType | None, shell: RankShell) -> Activity:
    where = ""
    collective = ""
    while frame is not None:
        code = frame.f_code
        if not where:
            where = f"{frame.f_globals.get('__name__', '?')}.{code.co_name}"
        if _is_collective(code):
            collective = code.co_name
        count = shell.cell_of(code.co_filename)
        if count:
            return Activity(count, frame.f_lineno, where, collective)
        frame = frame.f_back
    return Activity(0, 0, where, collective)
