"""Runs a script as a rank's ``__main__``, as torchrun does in a process of its own.

A fresh script finds the state of a new process: none of the rank's names and groups, Python's own
``input()`` and hooks, torchrun's environment. Its end is that of a process but for the exit: within
the run, so that all output is the run's, threads are joined, exit handlers run, and files flushed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import filecmp
import gc
import getpass
import importlib
import io
import runpy
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder, SourceFileLoader
from multiprocessing import process, reduction
from typing import Any

from ...stdlib import open, os
from ...wire.modules import loaded
from ...wire.verbs import RunScript
from ..linux_process import flush_c_stdio
from ..static_lookup import traceback_of
from .child_processes import plain_dump, status_of
from .failures import Failures
from .features import RankContext
from .shell import RankShell, execute_file, remember_error, skip_machinery
from .stdin import PLAIN_GETPASS, PLAIN_INPUT, open_script_input
from .streams import DISPLAYS, Pump


def run_script(
    work: RunScript,
    context: RankContext,
    pump: Pump,
    failures: Failures,
    on_begin: Callable[[], object],
    on_failing: Callable[[], object],
) -> BaseException | None:
    """Run a script on this rank, up to the end of its threads and exit handlers; return the
    exception that it raised, or None.

    Args:
        work: the script.
        context: objects of the rank.
        pump: sends its output.
        failures: describes its exception.
        on_begin: called when it finds its environment, before its first line.
        on_failing: called when it has raised, before its threads end.
    """
    is_last = not (work.is_shared or work.keeps)  # no other code runs on this rank
    error: BaseException | None = None
    with contextlib.ExitStack() as undo:
        try:
            _prepare(work, context, pump, undo)
            on_begin()
            _execute(work, context.code)
        except BaseException as raised:
            error = _report(work.run, raised, failures, on_failing)
        context.shell.events.trigger("post_execute")
        if is_last:
            error = _end(context.shell) or error
        flush_c_stdio()
        pump.flush()
    if is_last:  # a daemon thread may print more
        sys.stdout = sys.stderr = open(os.devnull, "w")
    return error


def _prepare(work: RunScript, context: RankContext, pump: Pump, undo: contextlib.ExitStack) -> None:
    """Give this process the state in which the script begins; `undo` has the changes to undo."""
    shell, module = context.shell, context.shell.user_module
    option = "-m" if work.is_module else work.path
    options = ["-m", work.path] if work.is_module else [work.path]
    _, folder = _locate(work, context.code)
    out, err = sys.stdout, sys.stderr
    if work.is_terminal:
        pump.precede_children()
    else:
        out, err = _open_plain(1, sys.__stdout__), _open_plain(2, sys.__stderr__)
    if work.is_joined:
        undo.callback(os.dup2, undo.enter_context(open(os.dup(2), "wb")).fileno(), 2)
        os.dup2(1, 2)
    changes: list[tuple[Any, str, Any]] = [
        (pump, "is_whole", True),
        (sys.stdout, "is_terminal", work.is_terminal),
        (sys.stderr, "is_terminal", work.is_terminal),
        (sys, "stdout", out),
        (sys, "stderr", err),
        (sys, "argv", [option, *work.argv]),
        (sys, "orig_argv", [sys.executable, "-u", *options, *work.argv]),
        (sys, "excepthook", sys.__excepthook__),
        (sys, "breakpointhook", sys.__breakpointhook__),
        (builtins, "input", PLAIN_INPUT),
        (getpass, "getpass", PLAIN_GETPASS),
    ]
    if context.groups.rank == 0:
        changes.append((sys, "stdin", open_script_input(shell.ask)))
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    if work.is_shared:
        loaded.reload_changed()
        if not work.is_module:
            names = vars(module)
            undo.callback(_set_or_drop, names, "__file__", names.get("__file__"))
    else:
        changes += [
            (sys, "__stdout__", out),
            (sys, "__stderr__", err),
            (sys, "displayhook", sys.__displayhook__),
            (reduction, "dump", plain_dump),
            (process, "ORIGINAL_DIR", os.getcwd()),
        ]
        _forget_shadowed(folder)
        _hide_displays()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        context.groups.hide(undo)
        undo.enter_context(_without_ipython(shell))
        if work.keeps:
            names, given = vars(module), dict(vars(module))
            undo.callback(lambda: names.update(given | names))
            names.clear()
        else:
            module = sys.modules["__main__"] = types.ModuleType("__main__")
        own = {"__loader__": BuiltinImporter, "__annotations__": {}, "__builtins__": builtins}
        vars(module).update(vars(types.ModuleType("__main__")) | own)
    for owner, name, value in changes:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    shell.events.trigger("pre_execute")


def _open_plain(descriptor: int, given: Any) -> io.TextIOWrapper:
    """Return a stream as ``python -u`` opens it, with the encoding of the given one."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    vars(raw)["name"] = "<stdout>" if descriptor == 1 else "<stderr>"
    stream = io.TextIOWrapper(raw, given.encoding, given.errors, "\n", write_through=True)
    vars(stream)["mode"] = "w"
    return stream


def _locate(work: RunScript, code: str) -> tuple[str, str]:
    """Return the path of the script, and the folder that ``sys.path`` begins with.

    On another host these are the copies, but for a script of which the host has the same file, as
    on a file system that hosts share: scripts look for data beside theirs.
    """
    path, copy = os.path.abspath(work.path), os.path.join(code, work.copied)
    folder = copy if work.is_module else os.path.dirname(copy)
    if not (work.copied and os.path.isdir(folder)):
        return path, os.getcwd() if work.is_module else os.path.dirname(os.path.realpath(path))
    is_same = False
    with contextlib.suppress(OSError):
        is_same = filecmp.cmp(path, copy, shallow=False)
    return copy if os.path.isfile(copy) and not is_same else path, folder


def _execute(work: RunScript, code: str) -> None:
    if work.is_module:
        runpy._run_module_as_main(work.path)  # type: ignore[attr-defined]
        return
    path, names = _locate(work, code)[0], vars(sys.modules["__main__"])
    names["__file__"] = path
    if not work.is_shared:
        names.update(__loader__=SourceFileLoader("__main__", path), __cached__=None)
    execute_file(path, names)


def _report(
    run: int, raised: BaseException, failures: Failures, on_failing: Callable[[], object]
) -> BaseException | None:
    """Print the exception of a script as Python does, unless it is an interrupt; return the one
    that describes it, without its frames, or None for an exit with status 0.
    """
    seen = failures.as_seen(run, raised)
    if issubclass(type(seen), KeyboardInterrupt) and failures.is_stopped(run):
        return seen
    is_exit = issubclass(type(raised), SystemExit)
    status = status_of(raised) if is_exit else 1
    if status == 0:
        return None
    on_failing()
    failed = failures.of_script(run, raised, status if isinstance(status, int) else 1)
    if isinstance(status, str):
        with contextlib.suppress(OSError, ValueError):  # the script has closed it
            print(status, file=sys.stderr)
    elif not is_exit:
        tb = skip_machinery(traceback_of(raised))
        remember_error(BaseException.with_traceback(raised, tb))
        try:
            sys.excepthook(type(raised), raised, tb)
        except BaseException as other:  # as Python does
            print("Error in sys.excepthook:", file=sys.stderr)
            tb_of_hook = skip_machinery(traceback_of(other))
            other.__context__ = None
            sys.__excepthook__(type(other), other.with_traceback(tb_of_hook), tb_of_hook)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(raised), raised, tb)
    return failed


def _end(shell: RankShell) -> BaseException | None:
    """Carry out the end of a Python process up to its exit; return an interrupt of it, or None."""
    error: BaseException | None = None
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as raised:
            error = raised
    sys.last_type = sys.last_value = sys.last_exc = sys.last_traceback = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = shell.user_module
    gc.collect()  # the script's objects, whose finalizers may write
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedIOBase):
            with contextlib.suppress(Exception):  # it is closed, or broken
                each.flush()
    return error


def _forget_shadowed(folder: str) -> None:
    """Forget the modules that this process has imported and that a script finds in its folder, as
    that is searched first.
    """
    with contextlib.suppress(OSError):
        for name in {each.partition(".")[0] for each in os.listdir(folder)} & sys.modules.keys():
            own = getattr(sys.modules[name], "__spec__", None)
            if own is None or own.loader in (BuiltinImporter, FrozenImporter):
                continue
            found = PathFinder.find_spec(name, [folder])
            if found is not None and found.has_location and found.origin != own.origin:
                for each in [*sys.modules]:
                    if each.partition(".")[0] == name:
                        del sys.modules[each]


def _hide_displays() -> None:
    """Undo the choice of matplotlib's and plotly's backends for a notebook."""
    for name, value in DISPLAYS.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    if (matplotlib := sys.modules.get("matplotlib")) and "MPLBACKEND" not in os.environ:
        dict.__setitem__(matplotlib.rcParams, "backend", matplotlib.rcsetup._auto_backend_sentinel)


@contextlib.contextmanager
def _without_ipython(shell: RankShell) -> Iterator[None]:
    """Enter a context without IPython's builtins, and in which there is no IPython shell."""
    names = vars(builtins)
    shell.builtin_trap.deactivate()
    ours: dict[str, Any] = {
        name: names.pop(name) for name in ("__IPYTHON__", "display") if name in names
    }
    type(shell).clear_instance()
    yield
    names.update(ours)
    shell.builtin_trap.activate()
    for kind in type(shell)._walk_mro():
        kind._instance = shell  # type: ignore[assignment]


def _set_or_drop(names: dict[str, Any], name: str, value: Any) -> None:
    names.pop(name, None)
    if value is not None:
        names[name] = value
