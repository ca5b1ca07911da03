"""How faults strike from outside: signals, a cut connection."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping

import psutil

from tests.conftest import processes_named, stop_process

from .rig import Rig
from .watching import wait_until

STOPPED_S = 1.5


def kill_rank(rig: Rig, rank: int) -> None:
    """SIGKILL."""
    os.kill(rig.kept[rank].pid, signal.SIGKILL)


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
    "SIGKILL": kill_rank,
    "SIGSTOP, SIGCONT": stop_and_continue,
    "agent SIGKILL": kill_process("cellmesh-agent"),
    "zygote SIGKILL": kill_process("cellmesh-zygote"),
    "store SIGKILL": kill_process("cellmesh-store"),
    "controller socket cut": cut_connection,
}
