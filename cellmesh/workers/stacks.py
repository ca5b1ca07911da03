"""The Python stacks of a rank's threads, as the user's code made them."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
import types

from .debugger import user_part
from .shell import RankShell

_OWN_THREADS = "cellmesh-"


def format_stacks(shell: RankShell, all_threads: bool = False) -> str:
    """The main thread's stack as text, without the frames that are ours.

    Args:
        shell: knows which files are cells.
        all_threads: those that user code has started, too.
    """
    frames = sys._current_frames()
    main = threading.main_thread()
    text = _format_stack(frames.get(main.ident or 0), shell)
    if not all_threads:
        return text
    parts = [text]
    for thread in threading.enumerate():
        if thread is not main and not thread.name.startswith(_OWN_THREADS) and thread.ident in frames:
            parts.append(f"thread {thread.name}:\n{_format_stack(frames[thread.ident], shell)}")
    return "\n".join(parts)


def user_frames(frame: types.FrameType | None, shell: RankShell) -> list[types.FrameType]:
    """The frames of a stack from the cell's on, outermost first; without machinery where no cell runs.

    Args:
        frame: the innermost.
        shell: knows which files are cells.
    """
    stack: list[types.FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    stack.reverse()
    return stack[user_part(stack, shell)]


def _shorten(name: str) -> str:
    """The file of a library as it is imported, ``torch/distributed/distributed_c10d.py``."""
    places = {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
    for place in sorted(places, key=len, reverse=True):
        if name.startswith(f"{place}/"):
            return name[len(place) + 1 :]
    return name


def _format_stack(frame: types.FrameType | None, shell: RankShell) -> str:
    frames = user_frames(frame, shell)
    if not frames:
        return "  idle\n"
    lines = []
    for each in frames:
        name = each.f_code.co_filename
        summary = traceback.FrameSummary(name, each.f_lineno, each.f_code.co_name)
        count = shell.cell_of(name)
        where = f"In[{count}]" if count else f'"{_shorten(name)}"'
        lines.append(f"  {where}, line {each.f_lineno}, in {each.f_code.co_name}\n")
        if summary.line:
            lines.append(f"    {summary.line}\n")
    return "".join(lines)
