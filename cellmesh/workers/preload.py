"""Imports of modules that ranks have in common: a zygote's, once and checked, and those that ranks
still do, timed.

A zygote imports such modules in a forked copy of itself. If the copy succeeds it serves in the
zygote's place, which waits for its end; if a module raises, hangs, ends the process, or does what a
fork or another process must not inherit, only the copy is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from ..stdlib import threading, time
from ..wire.modules import is_users
from ..wire.preload import LEAST_S, change_preloads, is_found_installed, is_installed, leave_out
from ..wire.process import wait_readable
from .linux_process import die_with, name_arguments

# Modules that the first cells of most programs import on each rank.
BUILT_IN = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.checkpoint",
    "torch.profiler._cupti_monitor",
)
# Time limit of one module's import.
_HANGS_S = 60.0
# Changes that make a process unfit to be forked; torch may make the others (`_surface`).
_NEVER = ("starts threads", "forks", "uses CUDA")
# Copies of a zygote that may fail; then it goes on without the stage.
_MAX_COPIES = 6
_MAX_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Preloaded:
    """The modules that a zygote has imported besides torch.

    Attributes:
        built_in: number of modules of `BUILT_IN` that it has.
        learned: names of the project's modules that it has.
        num_bytes: memory that all of them take, once for all ranks.
        took_s: duration of the imports, in seconds.
    """

    built_in: int = 0
    learned: tuple[str, ...] = ()
    num_bytes: int = 0
    took_s: float = 0.0

    def describe(self) -> str:
        """Return a sentence for users; "" without any modules."""
        if not (self.built_in or self.learned):
            return ""
        parts = ["parts of torch"] if self.built_in else []
        if self.learned:
            shown = ", ".join(self.learned[:8]) + (", ..." if len(self.learned) > 8 else "")
            parts.append(f"{len(self.learned)} modules that this project's ranks import ({shown})")
        return (
            f"imported before the fork: {' and '.join(parts)}, in {self.took_s:.1f} s and "
            f"{self.num_bytes >> 20} MB, once for all ranks"
        )


@dataclass(frozen=True)
class Stage:
    """Modules that a zygote imports together.

    Attributes:
        names: the modules, in order.
        is_learned: whether they are the project's; those of torch may set variables.
    """

    names: tuple[str, ...]
    is_learned: bool


class Loading:
    """Imports stages of modules, each in a copy of this process that takes its place.

    Args:
        stages: the modules, in order.
        list_path: list of the project, in which modules that cannot be preloaded are noted.
        argument: argument in the copies' command lines that shows whose they are.
        hangs_s: time limit of one module's import, in seconds.

    Attributes:
        has: the modules that this process has imported.
    """

    def __init__(
        self, stages: Sequence[Stage], list_path: str, argument: str, hangs_s: float = _HANGS_S
    ) -> None:
        self.has = Preloaded()
        self._stages = [stage for stage in stages if stage.names]
        self._list_path, self._argument, self._hangs_s = list_path, argument, hangs_s
        self._num_failed = 0
        self._copy = 0  # process id; 0 without a copy
        self._connection: socket.socket | None = None
        self._current, self._since = "", 0.0

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when the copy has sent a message."""
        return [self._connection.fileno()] if self._connection is not None else []

    def limits(self, pause_s: float) -> list[float]:
        """Return the time in seconds after which `go_on` has work; [] for none.

        Args:
            pause_s: time to wait before a copy is made.
        """
        if self._connection is not None:
            return [max(0.0, self._since + self._hangs_s - time.monotonic())]
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
        reason = f"takes more than {self._hangs_s:g} s" if is_late else "ends the process"
        kind, name, text = json.loads(data) if data else ("failed", self._current, reason)
        if kind == "begins":
            self._current, self._since = name, time.monotonic()
        elif kind == "complete":
            return self._hand_over(pids)
        else:
            os.kill(self._copy, signal.SIGKILL)
            self._forget_copy()
            self._leave_out(name, text)
        return None

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
            self.has = _import_all(stage, self.has, theirs)
            theirs.send(json.dumps(("complete", "", "")).encode())
            with theirs:
                pids: list[int] = json.loads(theirs.recv(_MAX_MESSAGE_BYTES))
        except BaseException:
            os._exit(1)
        self._stages, self._num_failed = self._stages[1:], 0
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
        left = tuple(each for each in stage.names if each != name)
        may_go_on = self._num_failed < _MAX_COPIES and len(left) < len(stage.names)
        self._stages = [replace(stage, names=left), *rest] if left and may_go_on else rest
        if name:
            change_preloads(Path(self._list_path), lambda found: leave_out(found, name, reason))


def _import_all(stage: Stage, before: Preloaded, parent: socket.socket) -> Preloaded:
    """Import modules; end this process at the first that must not be imported here."""
    began_at, held_bytes = time.monotonic(), _held_bytes()
    standard = [os.dup(number) for number in (1, 2)]
    printed = os.memfd_create("cellmesh-printed")
    for number in (1, 2):
        os.dup2(printed, number)
    forks = Counter[str]()
    os.register_at_fork(before=lambda: forks.update("f"))
    torch = sys.modules["torch"]
    generator = torch.get_rng_state()
    now = dict(_surface(printed, forks))
    names = []
    for name in stage.names:
        is_found = is_found_installed if stage.is_learned else importlib.util.find_spec
        if not is_found(name):
            continue
        parent.send(json.dumps(("begins", name, "")).encode())
        try:
            importlib.import_module(name)
        except BaseException as error:
            _give_up(parent, name, f"raises {type(error).__name__}: {error}"[:300])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        last, now = now, dict(_surface(printed, forks))
        changed = [what for what in now if now[what] != last[what]]
        if changed and (stage.is_learned or changed[0] in _NEVER):
            _give_up(parent, name, changed[0])
        names.append(name)
    torch.set_rng_state(generator)
    for number, own in zip((1, 2), standard, strict=True):
        os.dup2(own, number)
        os.close(own)
    os.close(printed)
    return replace(
        before,
        built_in=before.built_in if stage.is_learned else len(names),
        learned=(*before.learned, *names) if stage.is_learned else before.learned,
        num_bytes=before.num_bytes + max(0, _held_bytes() - held_bytes),
        took_s=before.took_s + time.monotonic() - began_at,
    )


def _give_up(parent: socket.socket, name: str, reason: str) -> None:
    parent.send(json.dumps(("failed", name, reason)).encode())
    os._exit(1)


def _surface(printed: int, forks: Counter[str]) -> Iterator[tuple[str, object]]:
    """Yield what an import must leave as it is, each with a clause for users on its change."""
    torch = sys.modules["torch"]
    yield "starts threads", len(os.listdir("/proc/self/task"))
    yield "forks", (forks["f"], _has_children())
    yield "uses CUDA", torch.cuda.is_initialized()
    yield "prints", os.fstat(printed).st_size
    yield "opens files", len(os.listdir("/proc/self/fd"))
    yield "changes sys.path", tuple(sys.path)
    # Variables of torch itself are set by parts of torch, and by what is made for it.
    others = {n: v for n, v in os.environb.items() if not n.startswith((b"TORCH", b"PYTORCH"))}
    yield "changes the environment", others
    yield "changes the working directory", os.getcwd()
    yield "handles signals", [signal.getsignal(number) for number in signal.valid_signals()]
    yield "replaces streams", (sys.stdout, sys.stderr, sys.stdin, sys.excepthook)
    yield "configures logging", tuple(logging.getLogger().handlers)
    yield "configures torch", (torch.get_default_dtype(), torch.get_num_threads())


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


@dataclass(frozen=True)
class _Begun:
    """An import: its depth in other imports, and the state that it must not change, if user code
    asked for it.
    """

    depth: int
    state: tuple[int, bool] | None
    at_s: float


def _state() -> tuple[int, bool]:
    return len(os.listdir("/proc/self/task")), sys.modules["torch"].cuda.is_initialized()


class ImportTimes:
    """The imports that a rank has done since the last report.

    Attributes:
        total_s: their duration, in seconds.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen: dict[str, float] = {}
        self._stacks: dict[int, list[str]] = {}

    def install(self) -> None:
        """Time imports of modules that are not in `sys.modules`, from now on.

        `import` statements and `importlib.import_module` call a function of importlib for them. In
        its place stands one with its file's name, whose frame Python leaves out of tracebacks.
        """
        bootstrap: Any = sys.modules["_frozen_importlib"]
        plain: FunctionType = bootstrap._find_and_load
        bootstrap._find_and_load = timed(plain, self._begin, self._end)

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the time of all imports since the last call, and the installed modules that user
        code has imported, with the time of each, in seconds.
        """
        total_s, seen = self.total_s, self._seen
        self.total_s, self._seen, self._stacks = 0.0, {}, {}
        return total_s, {name: took_s for name, took_s in seen.items() if _is_installed(name)}

    def _begin(self, name: str) -> _Begun:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        stack.append(name)
        is_outer = len(stack) == 1 or _is_users(stack[-2])
        return _Begun(len(stack), _state() if is_outer else None, time.monotonic())

    def _end(self, name: str, begun: _Begun, is_whole: bool) -> None:
        took_s = time.monotonic() - begun.at_s
        del self._stacks.get(threading.get_ident(), [])[begun.depth - 1 :]
        if begun.depth == 1:
            self.total_s += took_s
        if is_whole and took_s >= LEAST_S and begun.state == _state():
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
