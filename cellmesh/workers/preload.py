"""Imports of modules that ranks have in common: a zygote's, once and checked, and those that ranks
still do, timed.

A zygote imports such modules in a forked copy of itself. If the copy succeeds it serves in the
zygote's place, which waits for its end; if a module raises, hangs, ends the process, or does what a
fork or another process must not inherit, only the copy is lost.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import json
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from ..stdlib import threading, time
from ..wire import marks
from ..wire.environment import SET_BY_MESH, SET_BY_TORCH, VISIBLE
from ..wire.modules import is_users
from ..wire.preload import (
    LEAST_S,
    change_preloads,
    is_found_installed,
    is_installed,
    leave_out,
    names_to_import,
    read_preloads,
    with_packages,
)
from ..wire.process import wait_readable
from .linux_process import become_subreaper, descendants, die_with, kill, name_arguments

# Modules that the first cells of most programs import on each rank; and those of torch.compile,
# which take another 45 MB.
_BUILT_IN = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.utils.serialization.config",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.checkpoint",
    "torch.profiler._cupti_monitor",
    f"{__package__}.warm_up",
)
_FOR_COMPILE = ("torch._dynamo.backends.common", "torch._inductor.compile_fx")
# Time limit of one module's import.
_HANGS_S = 60.0
# Changes that make a process unfit to be forked; torch may make the others (`_surface`).
_NEVER = ("starts threads", "forks", "uses CUDA")
# Copies of a zygote that may fail; then it goes on without the stage.
_MAX_COPIES = 6
_MAX_MESSAGE_BYTES = 1 << 16
# Devices that CUDA and ROCm open for good when they are initialized.
_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
# Variables that differ between ranks, or between them and the zygote.
_OWN = SET_BY_MESH - {marks.VARIABLE, "OPENBLAS_NUM_THREADS"} | {"OMP_NUM_THREADS", VISIBLE}


@dataclass(frozen=True)
class Preloaded:
    """The modules that a zygote has imported besides torch.

    Attributes:
        names: names of the modules, without those that they import.
        num_bytes: memory that all of them take, once for all ranks.
        took_s: duration of the imports, in seconds.
    """

    names: tuple[str, ...] = ()
    num_bytes: int = 0
    took_s: float = 0.0

    def describe(self) -> str:
        """Return a sentence for users; "" without any modules."""
        if not self.names:
            return ""
        packages = dict.fromkeys(name.partition(".")[0] for name in self.names)
        packages.pop("cellmesh", None)
        parts = ["parts of torch"] if packages.pop("torch", "") is None else []
        if packages:
            parts.append(f"modules that this project's ranks import, of {', '.join(packages)}")
        return (
            f"imported before the fork: {' and '.join(parts)}, in {self.took_s:.1f} s and "
            f"{self.num_bytes >> 20} MB, once for all ranks"
        )


def list_stages(learned: Iterable[str]) -> list[Sequence[str]]:
    """Return the stages of a zygote's imports after torch.

    Args:
        learned: names of modules that the project's ranks import.
    """
    return [_BUILT_IN, (*learned, *_FOR_COMPILE)]


class Loading:
    """Imports stages of modules, each in a copy of this process that takes its place.

    Args:
        stages: names of modules, in order; of each stage together.
        list_path: list of the project, in which modules that cannot be preloaded are noted.
        argument: argument in the copies' command lines that shows whose they are.
        hangs_s: time limit of one module's import, in seconds; more if one of them took ranks
            longer than a third of it.
        has: the modules that this process has imported.

    Attributes:
        has: likewise, with those of the stages.
        hangs_s: time limit of one module's import, in seconds.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[str]],
        list_path: str,
        argument: str,
        hangs_s: float = _HANGS_S,
        has: Preloaded | None = None,
    ) -> None:
        self.has = has or Preloaded()
        known = read_preloads(Path(list_path))
        possible = (names_to_import(known, each) for each in stages)
        self._stages = [names for names in possible if not sys.modules.keys() >= {*names}]
        self._list_path, self._argument = list_path, argument
        # Ranks have imported what is in the list, if slowly: that does not hang.
        took_s = (known.modules.get(name, 0.0) for names in self._stages for name in names)
        self.hangs_s = max(hangs_s, 3 * max(took_s, default=0.0))
        self._num_failed = 0
        self._copy = 0  # process id; 0 without a copy
        self._connection: socket.socket | None = None
        self._current, self._since = "", 0.0

    def add(self, names: Iterable[str]) -> None:
        """Import more modules, in another copy."""
        possible = names_to_import(read_preloads(Path(self._list_path)), names)
        if not sys.modules.keys() >= {*possible}:
            self._stages.append(possible)

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when the copy has sent a message."""
        return [self._connection.fileno()] if self._connection is not None else []

    def limits(self, pause_s: float) -> list[float]:
        """Return the time in seconds after which `go_on` has work; [] for none.

        Args:
            pause_s: time to wait before a copy is made.
        """
        if self._connection is not None:
            return [max(0.0, self._since + self.hangs_s - time.monotonic())]
        return [pause_s] if self._stages else []

    def go_on(self, pids: Iterable[int] = ()) -> int | list[int] | None:
        """Make a copy of this process, receive the copy's message, or let it serve. Blocks until
        its end once it serves.

        Args:
            pids: processes for which the copy has to wait.

        Returns:
            In this process the copy's wait status if it has served, else None. In a copy that is
            to serve from now on, the processes to wait for.
        """
        if self._connection is None:
            return self._fork()
        is_late = self.limits(0)[0] == 0
        data = b"" if is_late else self._connection.recv(_MAX_MESSAGE_BYTES)
        reason = f"takes more than {self.hangs_s:g} s" if is_late else "ends the process"
        kind, name, text = json.loads(data) if data else ("failed", self._current, reason)
        if kind == "begins":
            self._current, self._since = name, time.monotonic()
        elif kind == "complete":
            return self._hand_over(pids)
        else:
            self.drop_copy()
            self._leave_out(name, text)
        return None

    def drop_copy(self) -> None:
        """End the copy, if there is one, and what modules have started in it; `go_on` then makes
        another.
        """
        if self._connection is not None:
            kill([self._copy, *descendants(self._copy)])
            self._forget_copy()

    def finish(self) -> None:
        """Import all stages; in the end, this process serves or has ended. Blocks."""
        while limits := self.limits(0.0):
            wait_readable(self.descriptors(), limits[0])
            status = self.go_on()
            if isinstance(status, int):
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

    def _fork(self) -> list[int] | None:
        stage, parent = self._stages[0], os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._copy = os.fork()
        if self._copy:
            theirs.close()
            self._connection, self._current, self._since = ours, "", time.monotonic()
            return None
        try:
            ours.close()
            die_with(parent, 0)
            name_arguments(["cellmesh-preloads", self._argument])
            become_subreaper()
            self.has = _import_all(stage, self.has, theirs)
            become_subreaper(False)  # ranks are to be their agent's children
            theirs.send(json.dumps(("complete", "", "")).encode())
            with theirs:
                pids: list[int] = json.loads(theirs.recv(_MAX_MESSAGE_BYTES))
        except BaseException:
            os._exit(1)
        self._stages, self._num_failed = self._stages[1:], 0
        gc.freeze()  # else the agent of each mesh collects all that was imported: 0.3 s
        # A copy of this process has its name until it takes another one.
        is_last = not self._stages
        name_arguments([f"cellmesh-preloaded{'-all' if is_last else ''}", self._argument])
        return pids

    def _hand_over(self, pids: Iterable[int]) -> int:
        assert self._connection is not None
        with contextlib.suppress(OSError):  # it was killed
            self._connection.send(json.dumps(list(pids)).encode())
        self._stages = []
        return self._forget_copy()

    def _forget_copy(self) -> int:
        """Wait for the copy's end; return its wait status."""
        assert self._connection is not None
        pid = status = 0
        while pid != self._copy:
            pid, status = os.wait()
        self._connection.close()
        self._copy, self._connection = 0, None
        return status

    def _leave_out(self, name: str, reason: str) -> None:
        stage, *rest = self._stages
        self._num_failed += 1
        left = tuple(each for each in stage if name not in with_packages(each))
        may_go_on = self._num_failed < _MAX_COPIES and len(left) < len(stage)
        self._stages = [left, *rest] if left and may_go_on else rest
        if name:
            change_preloads(Path(self._list_path), lambda found: leave_out(found, name, reason))


class _Scanned(str):
    """Name of a variable in a scan of the environment, which asks for those that begin alike."""

    __slots__ = ()

    def startswith(self, *args: Any) -> bool:
        Watched.prefixes.update([args[0]] if isinstance(args[0], str) else args[0])
        return super().startswith(*args)


class Watched(os._Environ[str]):
    """The environment during imports; records which variables they look up, and counts how often
    that was one of which each rank has its own value, and which is hidden.
    """

    num_asked: ClassVar[int] = 0
    asked: ClassVar[set[str]] = set()
    prefixes: ClassVar[set[str]] = set()

    def __iter__(self) -> Iterator[str]:
        return map(_Scanned, super().__iter__())

    def __getitem__(self, name: str) -> str:
        if not isinstance(name, _Scanned):
            Watched.asked.add(name)
        try:
            return super().__getitem__(name)
        except KeyError:
            Watched.num_asked += name in _OWN
            raise


def _import_all(names: Sequence[str], before: Preloaded, parent: socket.socket) -> Preloaded:
    """Import modules; end this process at the first that must not be imported here."""
    began_at, held_bytes = time.monotonic(), _held_bytes()
    standard = [os.dup(number) for number in (1, 2)]
    printed = os.memfd_create("cellmesh-printed")
    for number in (1, 2):
        os.dup2(printed, number)
    variables: Any = os.environ
    plain, variables.__class__ = type(variables), Watched
    values = variables._data
    hidden = {name: values.pop(name) for name in map(os.fsencode, _OWN) if name in values}
    _draw()
    functions = _functions()
    now, done = dict(_surface(printed, functions)), []
    is_found = functools.cache(is_found_installed)
    for name in names:
        package = next((each for each in with_packages(name) if each not in sys.modules), "")
        is_of_torch, is_own = name.startswith("torch."), name.startswith(f"{__package__}.")
        if not (is_of_torch or is_own or is_found(name.partition(".")[0])):
            continue
        if not package:
            done.append(name)
            continue
        parent.send(json.dumps(("begins", package, "")).encode())
        num_modules = len(sys.modules)
        try:
            importlib.import_module(name)
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and error.name in with_packages(name):
                continue  # it was uninstalled, or torch is of another version
            _give_up(parent, package, f"raises {type(error).__name__}: {error}"[:300])
        done.append(name)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        last, now = now, dict(_surface(printed, functions))
        changed = [what for what in now if now[what] != last[what]]
        if not is_of_torch and any(map(_is_users, list(sys.modules)[num_modules:])):
            changed.append("imports modules of your own")
        if changed and (not is_of_torch or changed[0] in _NEVER):
            _give_up(parent, package, changed[0])
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()  # as torch does in each rank, which costs it a copy of 300 pages
    variables.__class__ = plain
    values.update(hidden)
    for number, own in zip((1, 2), standard, strict=True):
        os.dup2(own, number)
        os.close(own)
    os.close(printed)
    return Preloaded(
        (*before.names, *done),
        before.num_bytes + max(0, _held_bytes() - held_bytes),
        before.took_s + time.monotonic() - began_at,
    )


def _give_up(parent: socket.socket, name: str, reason: str) -> None:
    parent.send(json.dumps(("failed", name, reason)).encode())
    while True:  # until `drop_copy`, which ends this process's children as well
        signal.pause()


def _draw() -> None:
    """Bring the generators into a state in which a few draws leave all words as they are, but for
    an index, as opposed to a seed. Ranks seed those of Python and NumPy (`rank.main`).
    """
    random.random()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].random()


def _functions() -> list[tuple[Mapping[str, Any], str]]:
    """Return the functions that an import must not replace: namespace and name of each."""
    torch = sys.modules["torch"]
    owners = (torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.distributed)
    spaces = [vars(owner) for owner in (builtins, *owners)]
    return [(space, name) for space in spaces for name in space if callable(space[name])]


def _surface(
    printed: int, functions: list[tuple[Mapping[str, Any], str]]
) -> Iterator[tuple[str, object]]:
    """Yield what an import must leave as it is, each with a clause for users on its change."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy.random") and sys.modules["numpy"]
    yield "starts threads", len(os.listdir("/proc/self/task"))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # those that have ended
    yield "forks", (children.ru_minflt, _has_children())
    opened = sorted(_opened())
    yield "uses CUDA", torch.cuda.is_initialized() or any(each in opened for each in _DEVICES)
    yield "reads variables of which each rank has its own, as RANK", Watched.num_asked
    yield "prints", os.fstat(printed).st_size
    yield "opens files", opened
    yield "changes sys.path", tuple(sys.path)
    yield "changes the environment", _variables()
    yield "changes the working directory", os.getcwd()
    yield "changes the locale", locale.setlocale(locale.LC_ALL)
    yield "handles signals", [signal.getsignal(number) for number in signal.valid_signals()]
    hooks = (sys.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook)
    yield "replaces streams or hooks", (sys.stdout, sys.stderr, sys.stdin, *hooks)
    root = logging.getLogger()
    yield "configures logging", (tuple(root.handlers), root.level, root.manager.disable)
    yield "draws random numbers", torch.get_rng_state().tolist()
    words = numpy and numpy.random.get_state()[1].tolist()
    yield "seeds random numbers", (random.getstate()[1][:-1], words)
    defaults = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
    modes = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    speeds = (torch.get_num_threads(), torch.backends.cudnn.benchmark, sys.getrecursionlimit())
    settings = (*defaults, *modes, *speeds, numpy and numpy.geterr())
    yield "configures torch, NumPy or Python", settings
    yield "replaces functions of torch", [space.get(name) for space, name in functions]


def _opened() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            yield os.readlink(f"/proc/self/fd/{number}")


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _held_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- on ranks


# An import's depth in others, whether user code asks for it, the state that it must leave, a time.
_Begun = tuple[int, bool, tuple[int, bool], float]


def _state() -> tuple[int, bool]:
    return len(os.listdir("/proc/self/task")), sys.modules["torch"].cuda.is_initialized()


def _variables() -> dict[bytes, bytes]:
    torchs = tuple(map(os.fsencode, SET_BY_TORCH))
    return {name: value for name, value in os.environb.items() if name not in torchs}


class ImportTimes:
    """The imports that a rank has done since the last report.

    Attributes:
        total_s: their duration, in seconds.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen: dict[str, float] = {}
        self._asked: list[str] = []  # by user code
        # The environment that user code has found, and whether it has left that as it was.
        self._variables: dict[bytes, bytes] = {}
        self._is_as_found = True
        self._stacks: dict[int, list[str]] = {}

    def install(self) -> None:
        """Time imports of modules that are not in `sys.modules`, from now on.

        `import` statements and `importlib.import_module` call a function of importlib for them. In
        its place stands one with its file's name, whose frame Python leaves out of tracebacks.
        """
        self._variables = _variables()
        bootstrap: Any = sys.modules["_frozen_importlib"]
        plain: FunctionType = bootstrap._find_and_load
        bootstrap._find_and_load = timed(plain, self._begin, self._end)

    def accept_environment(self) -> None:
        """Take the present variables for those that the rank began with, as it sets some itself
        for a script.
        """
        self._variables = _variables()

    def take(self) -> tuple[float, dict[str, float], tuple[str, ...]]:
        """Return the time of all imports since the last call; the installed modules among them,
        with the time of each, in seconds; and those of them that user code has imported.
        """
        total_s, asked = self.total_s, self._asked
        seen = {name: took_s for name, took_s in self._seen.items() if _is_installed(name)}
        self.total_s, self._seen, self._asked, self._stacks = 0.0, {}, [], {}
        return total_s, seen, tuple(name for name in asked if name in seen)

    def _begin(self, name: str) -> _Begun:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        stack.append(name)
        is_asked = len(stack) == 1 or _is_users(stack[-2])
        if is_asked:
            self._asked.append(name)
            # Packages may read variables that user code has set on the ranks, and not in a zygote.
            self._is_as_found = _variables() == self._variables
        return len(stack), is_asked, _state(), time.monotonic()

    def _end(self, name: str, begun: _Begun, is_whole: bool) -> None:
        depth, is_asked, state, at_s = begun
        took_s = time.monotonic() - at_s
        del self._stacks.get(threading.get_ident(), [])[depth - 1 :]
        if depth == 1:
            self.total_s += took_s
        if not (is_whole and self._is_as_found):
            return
        if is_asked and not _is_users(name):  # the package may have set some itself
            self._variables = _variables()
        if took_s >= LEAST_S and state == _state():
            self._seen[name] = took_s


def timed(
    plain: FunctionType, begin: Callable[[str], Any], end: Callable[[str, Any, bool], None]
) -> Any:
    """Return a function in place of importlib's `_find_and_load` that calls both functions.

    Args:
        plain: importlib's function.
        begin: called with a module's name before it is imported.
        end: called with the name, the value of `begin`, and whether the import has succeeded.
    """

    def _find_and_load(name: str, import_: Any) -> Any:
        begun = begin(name)
        is_whole = False
        try:
            module = plain(name, import_)
            is_whole = True
            return module
        finally:
            end(name, begun, is_whole)

    own: Any = _find_and_load
    own.__code__ = own.__code__.replace(co_filename=plain.__code__.co_filename)
    return own


def _origin(name: str) -> str | None:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    return origin if isinstance(origin, str) else None


def _is_installed(name: str) -> bool:
    origin = _origin(name)
    return origin is not None and is_installed(origin)


def _is_users(name: str) -> bool:
    origin = _origin(name)
    return origin is not None and is_users(origin)
