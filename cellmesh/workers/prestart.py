"""A background process that imports torch before a mesh is started: of a notebook's kernel, or of
a user's shells.

It has imported everything that ranks need, and has one thread. For each mesh it forks a guardian,
which forks the agent, which forks the mesh's own zygote, all with torch imported; the background
process stays for the next mesh. It ends with the kernel, or when none of its meshes has lived for
some time. That of shells listens on a socket (`wire.waiting`), and serves a process of its user if
the mesh would inherit the same from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..wire import marks
from ..wire.environment import SET_BY_MESH, SET_BY_TORCH
from ..wire.marks import NUM_DESCRIPTORS, StartMesh, read_order
from ..wire.preload import read_preloads
from ..wire.process import wait_readable
from ..wire.waiting import IMPORTING, READY, Needs, accept, find_sockets, name_socket
from .agent import (
    agent,  # noqa: F401  (imports the agent's modules before the agent is forked)
    guardian,
)
from .linux_process import (
    die_with,
    live_on,
    name_arguments,
    name_process,
    receive_descriptors,
    run_and_exit,
)
from .preload import Loading, Watched, list_stages
from .zygote import Imported, import_all

if TYPE_CHECKING:
    from .rank.shell import RankShell

_IDLE_S = 0.5
# Variables that libraries read when they are loaded; those that Python code reads are recorded.
_READ_BY_LIBRARIES = (
    *("LD_", "PYTHON", "PYZMQ", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "TORCH", "PYTORCH"),
    *("ATEN_", "CUDA", "CUDNN", "CUBLAS", "NVIDIA", "NCCL", "GLOO", "HIP", "ROC", "HSA", "AMD_"),
    *("OMP_", "GOMP_", "KMP_", "MKL", "DNNL", "ONEDNN", "OPENBLAS"),
)
# Each rank has its own values of these, or only a terminal depends on them.
_NOT_COMPARED = SET_BY_MESH | {*SET_BY_TORCH, "OMP_NUM_THREADS", "TERM"}


def main(argument: str, *_: str) -> None:
    """Run the background process, which `controller.session.launch.prestart` has started: import
    torch, then fork meshes on request.

    Args:
        argument: marks the process in its command line.
    """
    plan = json.loads(Path("/proc/self/fd/0").read_bytes())
    server, shells, kernel = socket.socket(fileno=plan["server"]), None, []
    server.set_inheritable(False)
    if owner_pid := plan["kernel_pid"]:
        try:
            # Only during the imports, as this also takes effect when the parent's starting thread
            # ends.
            die_with(owner_pid, 0)
            # Not by the socket: processes forked by the kernel may hold its other end, and live
            # longer.
            kernel = [os.pidfd_open(owner_pid)]
        except ProcessLookupError:
            return
    else:
        os.set_inheritable(plan["directory"], False)
        made_in = plan["conditions"], dict(os.environ)
        shells = Shells(plan["directory"], *made_in, plan["list_path"], {*plan["learned"]})
    name_process("cellmesh-waits")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_policy(os.SCHED_BATCH)  # while the kernel runs cells; ranks could not undo a nice value
    variables: Any = os.environ
    variables.__class__ = Watched
    shell = import_all()
    live_on()
    sys.modules[f"{__package__}.rank.main"].choose_displays()
    os.chdir("/")
    sys.stdout.flush()  # else each fork would write the buffer
    stages = list_stages(plan["learned"]) if plan["list_path"] != os.devnull else []
    loading = Loading(stages, plan["list_path"], f"{argument}.copy")
    waiting = _Waiting(server, kernel, plan["keep_s"], shell, loading, shells)
    if shells is None:
        with contextlib.suppress(OSError):  # the kernel has ended, as its pidfd shows
            server.send(READY)
    else:
        shells.note()
        waiting.watch([plan["owner"]])  # the first run, which began without this zygote
    waiting.serve()
    loading.drop_copy()
    os._exit(0)  # an interpreter with torch takes long to shut down


def _set_policy(policy: int) -> None:
    with contextlib.suppress(OSError):  # the kernel's policy is SCHED_IDLE, or a real-time one
        os.sched_setscheduler(0, policy, os.sched_param(0))


@dataclass
class Shells:
    """The part of the zygote of shells that a kernel's lacks: its socket, and what a mesh would
    inherit from it.

    Attributes:
        directory: the directory of sockets, open.
        conditions: its properties that a mesh would inherit.
        environment: the environment in which it was made.
        list_path: list of the project that it has served last; "" without one.
        learned: modules that it has loaded or tried to load for this project, and then serves no
            other.
        pid: process id of the zygote; copies of it serve in its place.
    """

    directory: int
    conditions: Mapping[str, str]
    environment: Mapping[str, str]
    list_path: str
    learned: set[str] = field(default_factory=set)
    pid: int = field(default_factory=os.getpid)

    def note(self) -> None:
        """Show in the directory how many modules it has learned, and that it was used now."""
        name = name_socket(self.pid, len(self.learned))
        with contextlib.suppress(OSError):
            for each in find_sockets(self.directory):
                if each.process.pid == self.pid:
                    os.rename(each.name, name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
            os.utime(name, dir_fd=self.directory)

    def take(self, order: StartMesh) -> str:
        """Return why a mesh cannot be forked; "" if it can, once all is imported."""
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in order.environment.items()}
        needs = order.needs or Needs({}, (), "", ())
        if misfit := self.misfit(needs, environment):
            return f"{misfit} is not what it was when the waiting zygote was made"
        self.list_path = needs.list_path
        self.note()
        return ""

    def misfit(self, needs: Needs, environment: Mapping[str, str]) -> str:
        """Return a property or a variable that differs for a mesh, or a module that it would import
        from another place; "" if the mesh can be forked from this process.
        """
        if self.learned and needs.list_path != self.list_path:
            return "the project"
        for name in sorted(self.conditions.keys() | needs.conditions.keys()):
            if self.conditions.get(name) != needs.conditions.get(name):
                return name
        read = (*_READ_BY_LIBRARIES, *Watched.prefixes)
        for name in sorted((self.environment.keys() | environment.keys()) - _NOT_COMPARED):
            is_read = name in Watched.asked or name.startswith(read)
            if is_read and self.environment.get(name) != environment.get(name):
                return name
        for package in sorted({name.partition(".")[0] for name in self.learned}):
            spec = getattr(sys.modules.get(package), "__spec__", None)
            found = spec and PathFinder.find_spec(package, needs.sys_path)
            if spec and (found is None or found.origin != spec.origin):
                return package
        return ""

    def more_to_learn(self) -> list[str]:
        """Return the modules that the project has learned since."""
        names = read_preloads(Path(self.list_path)).modules
        more = [name for name in names if name not in self.learned]
        self.learned.update(more)
        self.note()
        return more


class _Waiting:
    """The waiting zygote, once it has imported torch: forks a mesh's guardian on each request, and
    loads more modules between requests (`preload`).

    Args:
        server: connection to the kernel, or the listening socket for shells.
        kernel: pidfd of the kernel; () for shells.
        keep_s: how long it waits for a request while no mesh lives, in seconds.
        shell: the ranks' shell.
        loading: the modules to load.
        shells: what a kernel's zygote lacks; None for a kernel's.
    """

    def __init__(
        self,
        server: socket.socket,
        kernel: Sequence[int],
        keep_s: float,
        shell: RankShell,
        loading: Loading,
        shells: Shells | None = None,
    ) -> None:
        self._server, self._kernel, self._keep_s = server, kernel, keep_s
        self._shell, self._loading, self._shells = shell, loading, shells
        self._guardians: dict[int, int] = {}  # of living meshes: pidfd -> pid
        self._pause_s = _IDLE_S

    def serve(self) -> None:
        """Serve until the kernel ends, or no request is sent for `keep_s` while no mesh lives."""
        ends = time.monotonic() + self._keep_s
        self._learn()
        while self._guardians or time.monotonic() < ends:
            limits = [] if self._guardians else [max(0.0, ends - time.monotonic())]
            limits += self._loading.limits(self._pause_s)
            own = self._own()
            numbers = (*own, *self._loading.descriptors())
            ready = set(wait_readable(numbers, min(limits) if limits else None))
            if ready.intersection(self._kernel):
                return
            for number in self._guardians.keys() & ready:
                os.close(number)
                with contextlib.suppress(ChildProcessError):  # another process has forked it
                    os.waitpid(self._guardians.pop(number), 0)
                ends = time.monotonic() + self._keep_s
                self._learn()
            if self._server.fileno() in ready:
                if not self._answer():
                    return
            elif not ready.intersection(own) and (self._guardians or time.monotonic() < ends):
                outcome = self._loading.go_on(self._guardians.values())
                if isinstance(outcome, int):
                    if os.WIFEXITED(outcome):
                        return
                elif outcome is not None:  # this is the copy
                    self._pause_s = 0.0
                    self._guardians.clear()
                    self.watch(outcome)
                    self._learn()

    def watch(self, pids: Iterable[int]) -> None:
        """Live on while these processes do."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._guardians[os.pidfd_open(pid)] = pid

    def _own(self) -> tuple[int, ...]:
        return (self._server.fileno(), *self._kernel, *self._guardians)

    def _learn(self) -> None:
        if self._shells is not None and (more := self._shells.more_to_learn()):
            self._loading.add(more)

    def _answer(self) -> bool:
        """Fork a mesh's guardian if there is a request; return False if the kernel has ended."""
        data, descriptors, connection = b"", list[int](), self._server
        with contextlib.ExitStack() as stack:
            # The closed pipe shows it if there is no process or memory, or the request is damaged.
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if self._shells is not None:
                    connection = stack.enter_context(accept(self._server))
                data, descriptors = receive_descriptors(connection, 1, NUM_DESCRIPTORS)
                if len(descriptors) == NUM_DESCRIPTORS:
                    self._fork(descriptors, connection)
            for number in descriptors:
                os.close(number)
        return bool(data) or self._shells is not None

    def _fork(self, descriptors: Sequence[int], connection: socket.socket) -> None:
        """Fork a mesh's guardian, or write to its pipe why it is not forked."""
        _, pipe, _ = descriptors
        order = read_order(descriptors)
        if self._shells is not None:
            problem = self._shells.take(order)
            self._learn()
            if not problem and self._loading.limits(0.0):
                # Each rank would import the rest by itself.
                problem, self._pause_s = IMPORTING, 0.0
            if problem:
                os.write(pipe, problem.encode(errors="replace"))
                return
        own = {connection.fileno(), *self._own(), *self._loading.descriptors()}
        if self._shells is not None:
            own.add(self._shells.directory)
        imported = Imported(self._shell, self._loading.has)
        pid = os.fork()
        if pid == 0:
            run_and_exit(functools.partial(become_guardian, order, descriptors, own, imported))
        self.watch([pid])


def become_guardian(
    order: StartMesh, descriptors: Sequence[int], own: Iterable[int], imported: Imported
) -> int:
    """Be the guardian of a mesh, in a process that was forked for it; return its exit code.

    Args:
        order: the request for the mesh.
        descriptors: those that were sent with it.
        own: those of the parent, which are closed.
        imported: what the parent has imported.
    """
    for number in own:
        os.close(number)
    os.setsid()
    marks.claim(os.urandom(8).hex())  # not the parent's, and found by `is_apart`
    _set_policy(order.policy)
    if order.needs is not None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            is_ignored = number in order.needs.ignored
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    _, pipe, log = descriptors
    for number, standard in enumerate((null, pipe, log)):
        os.dup2(standard, number)
    for number in (*descriptors, null):
        os.close(number)
    variables: Any = os.environ
    variables.__class__ = os._Environ
    os.environ.clear()
    os.environb.update(order.environment)
    os.chdir(order.cwd)
    name_arguments([__package__ or "", order.ticket_path])
    return guardian.main(order.ticket_path, imported)
