"""Processes that user code starts with multiprocessing: how functions are sent to them, and how a
stop ends them.

A spawned process imports the main module for the functions and classes that it is given. On a rank
the main module is no file but the namespace of its cells: what a cell has defined travels by value.

A cell that is stopped takes the processes along that it has started and that are no daemons, as a
script that is stopped at the keyboard does: one that waits for others in C++ sees no SIGINT, and
keeps its port.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import signal
import time
import types
from collections.abc import Callable
from multiprocessing import active_children, context, reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

# How long children may take to end by themselves after a signal.
_GRACE_S = 0.4


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by value, and queues, locks and shared tensors as multiprocessing does."""

    @property
    def dispatch_table(self) -> Any:
        of_multiprocessing = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        return collections.ChainMap(of_multiprocessing, cloudpickle.Pickler.dispatch_table)


def follow_children(current_run: Callable[[], int]) -> None:
    """Let spawned processes load functions and classes of cells, and note which run has started
    each process.

    Args:
        current_run: the run that the caller's thread belongs to.
    """
    reduction.ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]
    start = BaseProcess.start

    def start_in_run(self: Any) -> None:
        self._cellmesh_run = current_run()
        start(self)

    BaseProcess.start = start_in_run  # type: ignore[method-assign]


def end_children(run: int) -> None:
    """After a stop, wait for the processes that the run has started, and kill those that do not
    end.
    """
    children = [child for child in active_children() if vars(child).get("_cellmesh_run") == run]
    children = [child for child in children if not child.daemon]
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _GRACE_S
        while children and time.monotonic() < deadline:
            wait([child.sentinel for child in children], deadline - time.monotonic())
            children = [child for child in children if child.is_alive()]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid or 0, number)


def _reduce(pickler: Any, value: Any) -> Any:
    if not isinstance(value, types.FunctionType | type) or value.__module__ != "__main__":
        return NotImplemented
    if (
        context.get_spawning_popen() is None
    ):  # a queue's item: the other side may be a fork, which has it
        return NotImplemented
    file = io.BytesIO()
    _ByValue(file).dump(value)
    return cloudpickle.loads, (file.getvalue(),)
