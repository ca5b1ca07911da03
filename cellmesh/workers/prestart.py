"""A background process of a notebook's kernel that imports torch before a mesh is started.

It has imported everything that ranks need, and has one thread. For each mesh it forks a guardian,
which forks the agent, which forks the mesh's own zygote, all with torch imported; the background
process stays for the next mesh. It ends with the kernel, or when none of its meshes has lived for
some time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..wire.marks import READY, StartMesh
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
from .zygote import import_all

if TYPE_CHECKING:
    from .rank.shell import RankShell

_NUM_DESCRIPTORS = 3
# Imports of most of a second on each rank that uses DTensor or FSDP2; forked ranks inherit them.
_IMPORTED_WHEN_IDLE = ("torch.distributed.tensor", "torch.distributed.fsdp")
_IDLE_S = 0.5


def main(descriptor: str, kernel_pid: str, keep_ms: str, *_: str) -> None:
    """Run the background process, which `wire.process` has started: import torch, then fork meshes
    when the kernel requests them.
    """
    _serve_kernel(int(descriptor), int(kernel_pid), int(keep_ms))


def _serve_kernel(descriptor: int, kernel_pid: int, keep_ms: int) -> None:
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
    os.chdir("/")
    sys.stdout.flush()  # else each fork would write the buffer
    with contextlib.suppress(OSError):  # the kernel has ended, as its pidfd shows
        kernel.send(READY)
    _serve(kernel, pidfd, keep_ms / 1000, shell)
    os._exit(0)  # an interpreter with torch takes long to shut down


def _set_policy(policy: int) -> None:
    with contextlib.suppress(PermissionError):  # the kernel's policy is SCHED_IDLE
        os.sched_setscheduler(0, policy, os.sched_param(0))


def _serve(kernel: socket.socket, pidfd: int, keep_s: float, shell: RankShell) -> None:
    guardians: dict[int, int] = {}  # of living meshes: pidfd -> pid
    ends = time.monotonic() + keep_s
    poll = select.poll()
    for number in (kernel.fileno(), pidfd):
        poll.register(number, select.POLLIN)
    has_idled = False
    while guardians or time.monotonic() < ends:
        left_s = None if guardians else max(0.0, ends - time.monotonic())
        wait_s = left_s if has_idled else _IDLE_S
        ready = poll.poll(None if wait_s is None else wait_s * 1000)
        if not (ready or has_idled):
            has_idled = True
            _import_when_idle()
        for number, _ in ready:
            if number in guardians:
                poll.unregister(number)
                os.close(number)
                os.waitpid(guardians.pop(number), 0)
                ends = time.monotonic() + keep_s
            elif number == pidfd:
                return
            else:
                data, descriptors = receive_descriptors(kernel, 1, _NUM_DESCRIPTORS)
                if not data:
                    return
                if pid := _fork_guardian(kernel, descriptors, (pidfd, *guardians), shell):
                    guardian_fd = os.pidfd_open(pid)
                    guardians[guardian_fd] = pid
                    poll.register(guardian_fd, select.POLLIN)


def _import_when_idle() -> None:
    for name in _IMPORTED_WHEN_IDLE:
        with contextlib.suppress(Exception):  # a rank that imports it raises the error again
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _fork_guardian(
    kernel: socket.socket, descriptors: Sequence[int], pidfds: Sequence[int], shell: RankShell
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
            run_and_exit(functools.partial(_become_guardian, descriptors, shell))
        return pid
    except OSError:
        return 0
    finally:
        for number in descriptors:
            os.close(number)


def _become_guardian(descriptors: Sequence[int], shell: RankShell) -> int:
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
    return guardian.main(order.ticket_path, shell)
