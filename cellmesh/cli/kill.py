"""Ends a mesh from outside: signals its agent, and kills what does not end.

Signals go through pidfds: a pidfd means one process, whatever its number comes to mean.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping

import psutil

from ..controller.session.hosts.standing import end_on_hosts
from ..errors import HostError
from ..wire.marks import is_dead
from ..wire.ticket import Ticket, remove_own_directory
from .meshes import Found, processes_of

# The agent gives ranks a second to leave, then kills them.
PATIENCE_S = 5.0
_LEAVE_S = 1.0
_KILL_S = 2.0
_MAX_ROUNDS = 4


def end(found: Found, patience_s: float = PATIENCE_S) -> bool:
    """End a mesh, or a zygote that waits for a notebook's next mesh. Blocks.

    SIGTERM goes to a mesh's agent or to the zygote, SIGKILL to what does not end; a mesh's
    directory is removed.

    Args:
        found: as `find_meshes` or `find_waiting` gives.
        patience_s: how long the agent or zygote may take before it is killed, in seconds.

    Returns:
        Whether it ended everything by itself.

    Raises:
        HostError: a process or the directory is still there.
    """
    if found.state == "waiting":
        return _end_waiting(found, patience_s)
    if found.ticket.spans_hosts:
        end_on_hosts(found.ticket, patience_s)
        return True
    return _end_mesh(found, patience_s)


def _end_mesh(found: Found, patience_s: float) -> bool:
    ticket = found.ticket
    orderly = True
    for _ in range(_MAX_ROUNDS):  # what is killed may have forked in between
        with _watched(ticket) as pidfds:
            if not pidfds:
                break
            orderly &= _end_processes(ticket.agent_pid, pidfds, patience_s)
    else:
        left = ", ".join(map(str, sorted(processes_of(ticket))))
        raise HostError(
            f"processes of {ticket.name} do not end even when killed: {left}. A driver or a file "
            "system hangs: try again later, else the host must be restarted"
        )
    remove_own_directory(ticket)
    if os.path.lexists(ticket.directory):
        raise HostError(
            f"{ticket.directory} has other files than this mesh's, or cannot be removed: look at it"
        )
    return orderly


def _end_waiting(found: Found, patience_s: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(found.pids[0])
        if process.create_time() == found.ticket.created_at:  # else the number is another's by now
            process.terminate()
            try:
                process.wait(patience_s)
            except psutil.TimeoutExpired:
                process.kill()
                return False
    return True


def sweep(found: Found) -> bool:
    """Kill the remaining processes of a mesh whose agent is dead, and remove its directory; return
    False, and do nothing, for a mesh that is alive.

    Raises:
        HostError: something of it is still there.
    """
    if found.state == "leftover" and is_dead(found.ticket):
        return not end(found)
    return found.state == "stale" and remove_own_directory(found.ticket)


def _end_processes(agent: int, pidfds: Mapping[int, int], patience_s: float) -> bool:
    """End these processes; return whether they ended without being killed."""
    orderly = False
    if agent in pidfds:
        _signal(pidfds[agent], signal.SIGTERM)
        orderly = _wait([pidfds[agent]], patience_s)
        if not orderly:
            _signal(pidfds[agent], signal.SIGKILL)
    # Each ends by itself when the agent has gone, unless it hangs.
    if _wait(pidfds.values(), _LEAVE_S):
        return orderly
    for pidfd in pidfds.values():
        _signal(pidfd, signal.SIGKILL)
    _wait(pidfds.values(), _KILL_S)
    return False


@contextlib.contextmanager
def _watched(ticket: Ticket) -> Iterator[dict[int, int]]:
    """Open a pidfd for each process of the mesh: pid -> pidfd."""
    pidfds: dict[int, int] = {}
    try:
        for pid in processes_of(ticket):
            try:
                pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        # A number may have changed hands before its pidfd was opened, but not since.
        for pid in pidfds.keys() - processes_of(ticket):
            os.close(pidfds.pop(pid))
        yield pidfds
    finally:
        for pidfd in pidfds.values():
            os.close(pidfd)


def _signal(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass


def _wait(pidfds: Iterable[int], timeout_s: float) -> bool:
    """Wait until all these processes have ended; return whether they have."""
    deadline = time.monotonic() + timeout_s
    left = set(pidfds)
    poll = select.poll()
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    while left:
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            return False
        for pidfd, _ in events:
            poll.unregister(pidfd)
            left.discard(pidfd)
    return True
