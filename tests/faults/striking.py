"""How faults strike from outside: signals, a memory limit, a cut connection."""

from __future__ import annotations

import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.conftest import processes_named, stop_process

from .rig import Rig
from .watching import wait_until

_ROOT_V1 = Path("/sys/fs/cgroup/memory")
_ROOT_V2 = Path("/sys/fs/cgroup")
# What ranks may take in all, above what the mesh has when the limit is set.
HEADROOM_BYTES = 256 << 20
STOPPED_S = 1.5


def signal_rank(number: int) -> Callable[[Rig, int], None]:
    """A strike that sends a signal to a rank."""
    return lambda rig, rank: os.kill(rig.kept[rank].pid, number)


def stop_and_continue(rig: Rig, rank: int) -> None:
    """SIGSTOP; the mesh answers without that rank; SIGCONT."""
    pid = rig.kept[rank].pid
    stop_process(pid)
    try:
        states = rig.mesh.states()
        assert set(states) == set(rig.kept) - {rank}, (
            f"a stopped rank is to be missing: {sorted(states)}"
        )
        threading.Event().wait(STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_process(name: str) -> Callable[[Rig, int], None]:
    """A strike that kills a process of the mesh."""

    def strike(rig: Rig, rank: int) -> None:
        wait_until(lambda: processes_named(rig.directory, name), 10, f"{name} is there")
        (process,) = processes_named(rig.directory, name)
        process.kill()
        assert not psutil.wait_procs([process], timeout=20)[1], f"{name} does not end"

    return strike


def cut_connection(rig: Rig, rank: int) -> None:
    """Shut down this process's connections to the agent, as a network or a proxy may do."""
    num_cut = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{entry}")
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as copy:
                if copy.family == socket.AF_UNIX and str(rig.directory) in str(copy.getpeername()):
                    copy.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        except OSError:  # gone meanwhile, or not connected
            continue
    assert num_cut, "no connection to the agent was found"


STRIKES: Mapping[str, Callable[[Rig, int], None]] = {
    "SIGKILL": signal_rank(signal.SIGKILL),
    "SIGSEGV": signal_rank(signal.SIGSEGV),
    "SIGSTOP, SIGCONT": stop_and_continue,
    "agent SIGKILL": kill_process("cellmesh-agent"),
    "zygote SIGKILL": kill_process("cellmesh-zygote"),
    "store SIGKILL": kill_process("cellmesh-store"),
    "controller socket cut": cut_connection,
}


class MemoryLimit:
    """A rank in a memory cgroup of its own, with little room left: with others in it the kernel
    might kill one more, as what the first one held is not free at once.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        root = _ROOT_V1 if _ROOT_V1.is_dir() else _ROOT_V2
        self._home = root / f"cellmesh-test-{uuid.uuid4().hex[:8]}"
        self._is_v1 = root == _ROOT_V1

    def __enter__(self) -> None:
        self._home.mkdir()
        (self._home / "cgroup.procs").write_text(str(self._pid))
        # Pages that a process had before it moved are not counted here: what counts is what comes.
        usage = "memory.usage_in_bytes" if self._is_v1 else "memory.current"
        used = int((self._home / usage).read_text())
        limit = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self._home / limit).write_text(str(used + HEADROOM_BYTES))
        if not self._is_v1:
            (self._home / "memory.swap.max").write_text("0")

    def __exit__(self, *exc: object) -> None:
        # It has been killed; where a test failed before that, it goes back to where it may live.
        if (self._home / "cgroup.procs").read_text().split():
            (self._home.parent / "cgroup.procs").write_text(str(self._pid))
        self._home.rmdir()


def can_limit_memory() -> bool:
    """Whether a memory cgroup can be made here."""
    root = _ROOT_V1 if _ROOT_V1.is_dir() else _ROOT_V2
    probe = root / f"cellmesh-test-{uuid.uuid4().hex[:8]}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return (probe / "memory.limit_in_bytes").exists() or (probe / "memory.max").exists()
    finally:
        probe.rmdir()
