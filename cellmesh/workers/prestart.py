"""A background process of a notebook's kernel that imports torch before a mesh is started.

It has imported everything that ranks need, and has one thread. For each mesh it forks a guardian,
which forks the agent, which forks the mesh's own zygote, all with torch imported; the background
process stays for the next mesh. It ends with the kernel, or when none of its meshes has lived for
some time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..wire.marks import READY, StartMesh
from ..wire.process import wait_readable
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
from .preload import Loading, list_stages
from .zygote import Imported, import_all

if TYPE_CHECKING:
    from .rank.shell import RankShell

_NUM_DESCRIPTORS = 3
_IDLE_S = 0.5


def main(descriptor: str, kernel_pid: str, keep_ms: str, argument: str, *_: str) -> None:
    """Run the background process, which `wire.process` has started: import torch, then fork meshes
    when the kernel requests them.
    """
    _serve_kernel(int(descriptor), int(kernel_pid), int(keep_ms), f"{argument}.copy")


def _serve_kernel(descriptor: int, kernel_pid: int, keep_ms: int, argument: str) -> None:
    """Fork meshes for a kernel until the kernel ends, or until it has sent no request for `keep_ms`
    and none of the meshes is running.
    """
    kernel = socket.socket(fileno=descriptor)
    kernel.set_inheritable(False)
    try:
        # Only during the imports, as this also takes effect when the parent's starting thread ends.
        die_with(kernel_pid, 0)
        # Not by the socket: processes forked by the kernel may hold its other end, and live longer.
        pidfd = os.pidfd_open(kernel_pid)
    except ProcessLookupError:
        return
    name_process("cellmesh-waits")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_policy(os.SCHED_BATCH)  # while the kernel runs cells; ranks could not undo a nice value
    shell = import_all()
    live_on()
    sys.modules[f"{__package__}.rank.main"].choose_displays()
    os.chdir("/")
    sys.stdout.flush()  # else each fork would write the buffer
    with contextlib.suppress(OSError):  # the kernel has ended, as its pidfd shows
        kernel.send(READY)
    loading = _plan(argument)
    _Waiting(kernel, pidfd, keep_ms / 1000, shell, loading).serve()
    loading.drop_copy()
    os._exit(0)  # an interpreter with torch takes long to shut down


def _set_policy(policy: int) -> None:
    with contextlib.suppress(PermissionError):  # the kernel's policy is SCHED_IDLE
        os.sched_setscheduler(0, policy, os.sched_param(0))


def _plan(argument: str) -> Loading:
    """Return the modules to load, as the kernel has written them to descriptor 0."""
    plan = json.loads(Path("/proc/self/fd/0").read_bytes())
    stages = list_stages(plan["learned"]) if plan["is_preloaded"] else []
    return Loading(stages, plan["list_path"], argument)


class _Waiting:
    """The waiting zygote, once it has imported torch: forks a mesh's guardian on each request, and
    loads more modules between requests (`preload`).
    """

    def __init__(
        self, kernel: socket.socket, pidfd: int, keep_s: float, shell: RankShell, loading: Loading
    ) -> None:
        self._kernel, self._pidfd, self._keep_s = kernel, pidfd, keep_s
        self._shell, self._loading = shell, loading
        self._guardians: dict[int, int] = {}  # of living meshes: pidfd -> pid

    def serve(self) -> None:
        """Serve the kernel until it ends, or sends no request for `keep_s` while no mesh lives."""
        ends, pause_s = time.monotonic() + self._keep_s, _IDLE_S
        while self._guardians or time.monotonic() < ends:
            limits = [] if self._guardians else [max(0.0, ends - time.monotonic())]
            limits += self._loading.limits(pause_s)
            own = (self._kernel.fileno(), self._pidfd, *self._guardians)
            numbers = (*own, *self._loading.descriptors())
            ready = set(wait_readable(numbers, min(limits) if limits else None))
            if self._pidfd in ready:
                return
            for number in self._guardians.keys() & ready:
                os.close(number)
                with contextlib.suppress(ChildProcessError):  # another process has forked it
                    os.waitpid(self._guardians.pop(number), 0)
                ends = time.monotonic() + self._keep_s
            if self._kernel.fileno() in ready:
                data, descriptors = receive_descriptors(self._kernel, 1, _NUM_DESCRIPTORS)
                if not data:
                    return
                imported = Imported(self._shell, self._loading.has)
                pid = _fork_guardian(self._kernel, descriptors, numbers[1:], imported)
                self._watch([pid] if pid else [])
            elif not ready.intersection(own) and (self._guardians or time.monotonic() < ends):
                outcome = self._loading.go_on(self._guardians.values())
                if isinstance(outcome, int):
                    if os.WIFEXITED(outcome):
                        return
                elif outcome is not None:  # this is the copy
                    pause_s = 0.0
                    self._guardians.clear()
                    self._watch(outcome)

    def _watch(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._guardians[os.pidfd_open(pid)] = pid


def _fork_guardian(
    kernel: socket.socket, descriptors: Sequence[int], pidfds: Sequence[int], imported: Imported
) -> int:
    """Fork a mesh's guardian for the kernel, and return its pid; return 0 if the fork fails, which
    the kernel notices as its pipe is closed.
    """
    try:
        pid = os.fork()
        if pid == 0:
            kernel.close()
            for number in pidfds:
                os.close(number)
            run_and_exit(functools.partial(_become_guardian, descriptors, imported))
        return pid
    except OSError:
        return 0
    finally:
        for number in descriptors:
            os.close(number)


def _become_guardian(descriptors: Sequence[int], imported: Imported) -> int:
    os.setsid()
    _set_policy(os.SCHED_OTHER)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    request, pipe, log = descriptors
    for number, standard in enumerate((null, pipe, log)):
        os.dup2(standard, number)
    with mmap.mmap(request, 0, prot=mmap.PROT_READ) as data:
        order = msgspec.msgpack.decode(data, type=StartMesh)
    for number in (*descriptors, null):
        os.close(number)
    os.environ.clear()
    os.environb.update(order.environment)
    os.chdir(order.cwd)
    name_arguments([__package__ or "", order.ticket_path])
    return guardian.main(order.ticket_path, imported)
