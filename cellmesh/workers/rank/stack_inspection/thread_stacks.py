"""Reads frames of running threads, with the garbage collector off.

Python makes a frame's object when code asks for it. That allocates, and in CPython 3.11 an
allocation may start the collector, whose finalizers may let other threads run; if one of them
leaves that very frame then, the new object is tied to memory that is used for something else,
and the process ends by SIGSEGV (3.12 collects between instructions only).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from ....stdlib import threading

_MACHINERY = ("IPython.core.", "cellmesh.")

# The collector is the process's: who turns it on again must be the last who wants it off.
_LOCK = threading.Lock()


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """A context without garbage collection, for moments only: other threads' changes to the
    collector's state may be lost.

    In less than the interpreter's switch interval after a thread has got the interpreter's lock
    there are no others that could say something.
    """
    with _LOCK:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def stack_of(frame: types.FrameType | None) -> list[types.FrameType]:
    """A frame and its callers, innermost first; of this thread, or under `collector_off`."""
    stack: list[types.FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def stacks_of_threads() -> dict[int, list[types.FrameType]]:
    """The frames of all threads, innermost first, by the thread's identity.

    They may have gone on by the time the caller looks at them.
    """
    with collector_off():
        return {identity: stack_of(frame) for identity, frame in sys._current_frames().items()}


def stack_of_main_thread() -> list[types.FrameType]:
    """The main thread's frames, innermost first."""
    with collector_off():
        return stack_of(sys._current_frames().get(threading.main_thread().ident or 0))


def module_of(frame: types.FrameType | None) -> str:
    """The module name in a frame's globals, "" if none; globals may be a mapping of the user's."""
    name = None if frame is None else dict.get(frame.f_globals, "__name__")
    return name if type(name) is str else ""


def local_value(frame: types.FrameType, name: str) -> object:
    """The value of a local name in a frame of a running thread; None if there is none."""
    with collector_off():
        return frame.f_locals.get(name, frame.f_globals.get(name))


def is_machinery(frame: types.FrameType) -> bool:
    """Whether a frame is of IPython's or cellmesh's code around user code."""
    return module_of(frame).startswith(_MACHINERY)


def user_part(frames: Sequence[types.FrameType], shell: Any) -> slice:
    """The frames of a stack from the first frame of user code on, outermost first.

    Args:
        frames: the stack.
        shell: knows which files are cells.
    """
    cells = (index for index, frame in enumerate(frames) if shell.cell_of(frame.f_code.co_filename))
    start = next(cells, None)
    if start is None:  # a call: the frames below the outermost ones, which are Python's and ours
        start = 0
        while start < len(frames) and not is_machinery(frames[start]):
            start += 1
        while start < len(frames) and is_machinery(frames[start]):
            start += 1
        if start == len(frames) and not any(map(is_machinery, frames)):
            start = 0  # a thread
    end = len(frames)
    while end > start and is_machinery(frames[end - 1]):
        end -= 1
    return slice(start, end)
