"""Formats the Python stacks of a rank's threads."""

from __future__ import annotations

import sysconfig
import threading
import traceback
import types
from collections.abc import Sequence

from ..shell import RankShell
from .thread_stacks import stacks_of_threads, user_part

_OWN_THREADS = "cellmesh-"


def format_stacks(shell: RankShell, all_threads: bool = False) -> str:
    """The main thread's stack as text, without cellmesh's own frames.

    Args:
        shell: knows which files are cells.
        all_threads: those that user code has started, too.
    """
    stacks = stacks_of_threads()
    main = threading.main_thread()
    text = _format_stack(stacks.get(main.ident or 0, ()), shell)
    if not all_threads:
        return text
    parts = [text]
    for thread in threading.enumerate():
        if (
            thread is not main
            and not thread.name.startswith(_OWN_THREADS)
            and thread.ident in stacks
        ):
            parts.append(f"thread {thread.name}:\n{_format_stack(stacks[thread.ident], shell)}")
    return "\n".join(parts)


def _user_frames(stack: Sequence[types.FrameType], shell: RankShell) -> Sequence[types.FrameType]:
    """The frames of a stack from the cell's frame on, outermost first; if no cell runs, all but
    cellmesh's and IPython's frames.
    """
    outermost_first = stack[::-1]
    return outermost_first[user_part(outermost_first, shell)]


def _shorten(name: str) -> str:
    """A library's file relative to the import path, ``torch/distributed/distributed_c10d.py``."""
    places = {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
    for place in sorted(places, key=len, reverse=True):
        if name.startswith(f"{place}/"):
            return name[len(place) + 1 :]
    return name


def _format_stack(stack: Sequence[types.FrameType], shell: RankShell) -> str:
    frames = _user_frames(stack, shell)
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
