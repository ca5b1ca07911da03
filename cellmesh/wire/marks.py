"""The environment variable that marks the processes of a mesh, and is inherited by processes that
user code starts.

Nothing else identifies a process that has left its session and lost its parents. The value is the
mesh's mark, a random word, and the process number of its owner:
``CELLMESH_MESH=0f3c5a...:0004711``. The zygote starts with the number 0; each rank writes its own
into the memory that ``/proc/PID/environ`` shows, so that processes which it forks have it there as
well.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .host import is_process, process_stat, started_ticks, this_place
from .process import wait_readable
from .ticket import Ticket, find_tickets, remove_own_directory
from .waiting import Needs

VARIABLE = "CELLMESH_MESH"
# A killed process may have forked in between.
_MAX_ROUNDS = 20
# An agent writes its number into the ticket within a second; a loaded machine may need longer.
_STARTING_S = 60.0


def value_of(mark: str, owner: int | None = None) -> str:
    """Return the beginning of the value that the environment variable `VARIABLE` has in a mesh's
    processes or, with an owner, in the owner's descendants.
    """
    return f"{mark}:" if owner is None else f"{mark}:{owner:07}"


def free_value() -> str:
    """Return a value that belongs to no mesh, for a process from which a zygote is forked: `claim`
    can replace it in place, as all values have one length.
    """
    return value_of(os.urandom(8).hex(), 0)


def claim(mark: str = "", owner: int | None = None) -> None:
    """Set the environment variable `VARIABLE` so that processes started from now on count as
    descendants of this one, also in this process's ``/proc/PID/environ`` if the variable is still
    there.

    Args:
        mark: mark of the mesh; "" if `VARIABLE` has it already.
        owner: process number of the owner; by default this process.
    """
    import ctypes  # not to look at marks

    mark = mark or os.environ.get(VARIABLE, "").partition(":")[0]
    value = value_of(mark, os.getpid() if owner is None else owner)
    entry = f"\0{VARIABLE}={value}\0".encode()
    begin, end = map(int, process_stat("self")[47:49])  # env_start, env_end (proc(5))
    block = b"\0" + ctypes.string_at(begin, end - begin)
    at = block.find(entry[: entry.index(b"=") + 1])
    if mark and at >= 0 and block.find(b"\0", at + 1) == at + len(entry) - 1:
        ctypes.memmove(begin + at, entry[1:], len(entry) - 1)
    if mark:
        os.environ[VARIABLE] = value


def is_apart(pid: int, mark: str) -> bool:
    """Return whether a process below the agent or the guardian of a mesh is the guardian of another
    mesh, which was forked from the zygote of that one: it owns another mark.

    Args:
        pid: process number of a child.
        mark: mark of the mesh.
    """
    own = re.search(rf"\0{VARIABLE}=(\w+):{pid:07}\0".encode(), _environment(pid) + b"\0")
    return own is not None and own[1] != mark.encode()


def carriers(value: str) -> list[int]:
    """Return the ids of the other processes whose environment variable `VARIABLE` begins with this
    value.
    """
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _carries(pid, value)]


def end_carriers(value: str, timeout_s: float = 2.0) -> None:
    """Kill the other processes whose environment variable `VARIABLE` begins with this value, and
    wait for their end.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(_MAX_ROUNDS):
        pids = carriers(value)
        for pid in pids:
            _end(pid, value, max(0.0, deadline - time.monotonic()))
        if not pids or time.monotonic() > deadline:
            return


def is_dead(ticket: Ticket) -> bool:
    """Return whether a mesh's agent on this host has certainly ended, or will never start, as the
    process that was to start the mesh has ended.

    The end is certain for an agent that ran in this PID namespace, or before a restart of the host.
    Of a mesh on many hosts that has started, only its agents know.
    """
    here, place = this_place(), ticket.place
    if ticket.spans_hosts and ticket.agents:
        return False
    began_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    if place.host == here.host and place.boot != here.boot and ticket.created_at < began_at:
        return True  # else another host has this one's name
    if place != here:
        return False
    if ticket.agent_pid:
        return not is_process(ticket.agent_pid, ticket.agent_ticks)
    # The agent of a notebook that was killed may not have signed the ticket yet.
    may_sign = not ticket.spans_hosts and time.time() < ticket.created_at + _STARTING_S
    return not may_sign and not started_ticks(ticket.controller_pid)


def end_dead_meshes(root: Path) -> None:
    """End the remaining processes of meshes whose agent has died, and remove the meshes'
    directories.

    Args:
        root: directory of all meshes, as `ticket.runtime_root` returns it.
    """
    for ticket in find_tickets(root):
        if (
            Path(ticket.directory).parent == root
        ):  # else it was written in a container that mounts the root elsewhere
            end_mesh_if_dead(ticket)


def end_mesh_if_dead(ticket: Ticket) -> None:
    """If a mesh's agent has died, end the mesh's remaining processes and remove its directory."""
    if is_dead(ticket):
        end_carriers(value_of(ticket.mark))
        remove_own_directory(ticket)


def _end(pid: int, value: str, timeout_s: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(pid, value):  # the number may be reused before the pidfd is open, but not after
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            wait_readable([pidfd], timeout_s)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _carries(pid: int, value: str) -> bool:
    return f"\0{VARIABLE}={value}".encode() in _environment(pid)


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


_NAME = "zygote-of-"
# Descriptors that a request to fork a mesh is sent with.
NUM_DESCRIPTORS = 3


class StartMesh(msgspec.Struct, frozen=True):
    """Ask the waiting zygote to fork a mesh's guardian; two descriptors go with the request: a pipe
    for the guardian's stdout, a log file for its stderr.

    The request is in a third file, as an environment may be larger than a message. `needs`: of a
    shell's mesh; a notebook compares its conditions itself. `policy`: how the kernel's or the
    shell's process is scheduled.
    """

    ticket_path: str
    cwd: bytes
    environment: dict[bytes, bytes]
    needs: Needs | None = None
    policy: int = os.SCHED_OTHER


def read_order(descriptors: Sequence[int]) -> StartMesh:
    """Return the request that was sent to a zygote with these `NUM_DESCRIPTORS` descriptors.

    Raises:
        OSError: it cannot be read.
        msgspec.MsgspecError: it is damaged.
    """
    data = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0)
    return msgspec.msgpack.decode(data, type=StartMesh)


def argument(root: Path, kernel_pid: int) -> str:
    """Return the command line argument that marks a waiting zygote.

    Args:
        root: directory of all meshes, as `ticket.runtime_root` returns it; the argument looks like
            a path in it, but no such file exists.
        kernel_pid: process id of the kernel whose zygote it is; 0 for the zygote of shells.
    """
    return f"{root}/{_NAME}{kernel_pid}"


def kernel_of(root: Path, arguments: list[str]) -> int | None:
    """Return the process id of the kernel whose waiting zygote has these command line arguments, 0
    for the zygote of shells; None if they are no zygote's.
    """
    for word in arguments:
        pid = word.removeprefix(f"{root}/{_NAME}")
        if pid != word and pid.isdecimal():
            return int(pid)
    return None
