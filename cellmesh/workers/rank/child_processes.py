"""Processes that user code starts by multiprocessing or ``os.fork``: gives them access to functions
defined in cells, and ends them when their cell is stopped.

A spawned process imports the main module to find the functions and classes that it is given. On a
rank the main module is not a file but the namespace of its cells: definitions of cells are pickled
by value, in one pickle, and become the process's main module. There functions share their globals,
and classes are found by name.

When a cell is stopped, the non-daemon processes that it has started are ended, as when a script is
stopped at the keyboard: a process that waits for others in C++ does not handle SIGINT, and keeps
its port.

A process that user code has forked ends when its code returns into the rank's loop. Otherwise it
would be a second rank, and read the first rank's messages from the work socket.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import io
import operator
import sys
import types
from collections.abc import Callable, Iterable
from multiprocessing import active_children, context, reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import IO, Any, NoReturn, Protocol

import cloudpickle

from ...stdlib import os, signal, threading, time
from ...wire import payload
from ..linux_process import write_stderr
from ..static_lookup import args_of, text_of

# How long children may take to end on their own after a signal.
_GRACE_S = 0.4


# A container with more items does not count as a constant.
_MAX_CONSTANTS = 1000
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


plain_dump = reduction.dump


class _Call:
    """An object whose pickle is a function call: loading the pickle calls the function and returns
    its result.

    The functions are Python's own, as the child may lack cellmesh.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> Any:
        return self._reduced


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler for a process that multiprocessing spawns: pickles functions and classes of cells
    by value, with one shared namespace, and queues, locks and shared tensors as multiprocessing
    does.

    Definitions that the process is not given are pickled without the large values that they use.
    """

    def __init__(self, file: IO[bytes], main: _Call, definitions: _Call) -> None:
        super().__init__(file)
        self.globals_ref[id(vars(sys.modules["__main__"]))] = main
        self._definitions = definitions
        self._is_given = True

    @property
    def dispatch_table(self) -> Any:
        of_multiprocessing = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        return collections.ChainMap(of_multiprocessing, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._definitions:  # they follow the process
            self._is_given = False
        if not issubclass(type(obj), type):
            return super().reducer_override(obj)
        payload.identify(obj)
        reduced = super().reducer_override(obj)
        payload.keep_qualname(obj, reduced)
        return reduced

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        if not self._is_given:
            slots = reduced[2][1]
            used = slots["__globals__"].items()
            slots["__globals__"] = {name: value for name, value in used if _is_light(value)}
        return reduced


def _is_light(value: Any) -> bool:
    """Return whether a global's value is a function, class, module or small constant, and so is
    cheap to pickle.
    """
    if isinstance(value, types.FunctionType | types.ModuleType | type):
        return True
    if type(value) in (list, tuple, set, frozenset):
        return len(value) <= _MAX_CONSTANTS and all(map(_is_light, value))
    if type(value) is dict:
        return _is_light([*value, *value.values()])
    return type(value) in _CONSTANTS


def _dump(process: BaseProcess | None, names: dict[str, Any]) -> bytes:
    """Return a pickle of a process object, which on loading also binds the cells' functions and
    classes in the child's main module.
    """
    file, main = io.BytesIO(), _Call(vars, sys.modules["__main__"])
    definitions = _Call(dict.update, main, names)
    spawned = _Call(operator.itemgetter(0), (process, definitions))
    _ByValue(file, main, definitions).dump(spawned)
    return file.getvalue()


def _can_be_sent(name: str, value: Any) -> bool:
    try:
        _dump(None, {name: value})
    except Exception:  # user code may raise anything
        return False
    return True


def _dump_for_child(obj: Any, file: Any, protocol: int | None = None) -> None:
    """Pickle a spawned process's arguments with the functions and classes of cells; replaces
    `multiprocessing.reduction.dump`.
    """
    if not isinstance(obj, BaseProcess):
        reduction.ForkingPickler(file, protocol).dump(obj)
        return
    names = {
        name: each
        for name, each in vars(sys.modules["__main__"]).items()
        if isinstance(each, types.FunctionType | type) and each.__module__ == "__main__"
    }
    # Descriptors that the child inherits, for pipes and locks: a failed attempt has added some.
    descriptors: Any = vars(context.get_spawning_popen())["_fds"]
    num_inherited = len(descriptors)
    try:
        dumped = _dump(obj, names)
    except Exception:
        names = {name: each for name, each in names.items() if _can_be_sent(name, each)}
        del descriptors[num_inherited:]
        dumped = _dump(obj, names)
    file.write(dumped)


def follow_children(current_run: Callable[[], int]) -> None:
    """Patch multiprocessing so that spawned processes can load functions of cells, and are recorded
    with the run (cell or call) that started them.
    """
    reduction.dump = _dump_for_child
    start = BaseProcess.start

    def start_in_run(self: Any) -> None:
        self._cellmesh_run = current_run()
        start(self)

    BaseProcess.start = start_in_run  # type: ignore[method-assign]


def end_children(run: int) -> None:
    """Wait for the processes that an interrupted run has started, and end those that do not exit by
    themselves.
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


def run_fork_hooks() -> None:
    """Run Python's hooks for a child process, in a process that C code has forked without them."""
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
    """Register a fork hook: each process that user code forks from now on closes its copies of the
    rank's connections, and ends when its code returns.

    Args:
        rank: this rank.
        connections: connections of the rank.
        in_child: called in each child with a function that ends the child; the function takes the
            exception that the child's code has raised, or None.
        render: returns the traceback of an exception as text.
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
            os._exit(status)  # without exit handlers, which are the rank's

    def guard() -> None:
        for connection in connections:
            connection.close()
        in_child(end)
        if threading.get_ident() != main:  # not below the rank's loop: ends with its function
            thread: Any = threading.current_thread()
            thread._invoke_excepthook = lambda _: end(sys.exc_info()[1])
            thread._delete = lambda: end(None)

    os.register_at_fork(after_in_child=guard)


def status_of(error: BaseException) -> int | str:
    """Return the exit status of a SystemExit: a number, or a text that Python prints before it
    exits with 1.
    """
    args = args_of(error)
    status = args[0] if args else None
    if status is None:
        return 0
    return status & 0xFF if type(status) in (int, bool) else text_of(error)
