"""Processes that user code starts with multiprocessing, or forks: how functions are sent to them,
and how they end.

A spawned process imports the main module for the functions and classes that it is given. On a rank
the main module is no file but the namespace of its cells: what a cell has defined travels by value.

A cell that is stopped takes the processes along that it has started and that are no daemons, as a
script that is stopped at the keyboard does: one that waits for others in C++ sees no SIGINT, and
keeps its port.

A process that user code has forked ends when its code returns into the rank's loop. It would be a
second rank otherwise, and read from the work socket what the agent sends to the first.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import io
import sys
import types
from collections.abc import Callable, Iterable
from multiprocessing import active_children, context, reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Protocol

import cloudpickle

from ...stdlib import os, signal, threading, time
from ..linux_process import write_stderr
from ..static_lookup import args_of, text_of

# How long children may take to end by themselves after a signal.
_GRACE_S = 0.4


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler for multiprocessing that pickles functions of cells by value, and queues, locks and
    shared tensors as multiprocessing does.
    """

    @property
    def dispatch_table(self) -> Any:
        of_multiprocessing = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        return collections.ChainMap(of_multiprocessing, cloudpickle.Pickler.dispatch_table)


def follow_children(current_run: Callable[[], int]) -> None:
    """Patch multiprocessing: spawned processes can load cells' functions, and carry their run."""
    reduction.ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]
    start = BaseProcess.start

    def start_in_run(self: Any) -> None:
        self._cellmesh_run = current_run()
        start(self)

    BaseProcess.start = start_in_run  # type: ignore[method-assign]


def end_children(run: int) -> None:
    """Wait for processes that an interrupted run has started, and kill those that do not end."""
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
    # For a queue's item: the other side may be a fork, which has the class.
    if context.get_spawning_popen() is None:
        return NotImplemented
    file = io.BytesIO()
    _ByValue(file).dump(value)
    return cloudpickle.loads, (file.getvalue(),)


def run_fork_hooks() -> None:
    """Run Python's hooks for a child process, in one that C code has forked without them."""
    ctypes.pythonapi.PyOS_AfterFork_Child()


End = Callable[[BaseException | None], NoReturn]


class _Closable(Protocol):
    def close(self) -> None: ...


def guard_forks(
    rank: int,
    connections: Iterable[_Closable],
    in_child: Callable[[End], None],
    render: Callable[[BaseException], str],
) -> None:
    """From now on, make each process that user code forks close the rank's connections, and end
    when its code returns.

    `in_child` is called in each child with the function that ends it, given what its code has
    raised.
    """
    pid_of_rank, main = os.getpid(), threading.get_ident()

    def end(error: BaseException | None) -> NoReturn:
        status = 1
        try:
            if error is None:
                status = 0
            elif issubclass(type(error), SystemExit):
                asked = status_of(error)
                if isinstance(asked, str):
                    write_stderr(f"{asked}\n")
                else:
                    status = asked
            else:
                child = (
                    f"process {os.getpid()}, forked from rank {rank} "
                    f"(process {pid_of_rank}), raised:"
                )
                write_stderr(f"{child}\n{render(error)}\n")
        finally:
            os._exit(status)  # without exit handlers: they are the rank's

    def guard() -> None:
        for connection in connections:
            connection.close()
        in_child(end)
        if threading.get_ident() != main:  # the rank's loop is not below it: its own function ends
            thread: Any = threading.current_thread()
            thread._invoke_excepthook = lambda _: end(sys.exc_info()[1])
            thread._delete = lambda: end(None)

    os.register_at_fork(after_in_child=guard)


def status_of(error: BaseException) -> int | str:
    """Return the exit status that a SystemExit asks for: a number, or a text that Python prints as
    it ends with 1.
    """
    args = args_of(error)
    status = args[0] if args else None
    if status is None:
        return 0
    return status & 0xFF if type(status) in (int, bool) else text_of(error)
