"""Finds meshes by their tickets and their states by their processes, and ends them from outside.

A mesh's guardian, agent, zygote and store have the ticket's path among their arguments (as forks of
one another); ranks and what they start have the mesh's mark in their environment. A process counts
as one of the mesh's by either, or by being below the agent, and never by its number alone.

Signals go through pidfds: a pidfd means one process, whatever its number comes to mean.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ..controller.session.living import children_of
from ..controller.session.standing import ask_agents, end_on_hosts, summarize
from ..errors import HostError
from ..wire import marks
from ..wire.host import this_place
from ..wire.marks import kernel_of
from ..wire.own_file import Secret
from ..wire.ticket import Holder, Ticket, find_tickets, read_holder, remove_own_directory

# An agent writes its number into the ticket within a second; a loaded machine may need longer.
STARTING_S = 60.0

# The agent gives ranks a second to leave, then kills them.
PATIENCE_S = 5.0
_LEAVE_S, _KILL_S, _MAX_ROUNDS = 1.0, 2.0, 4
# Two hosts may both have mounted one of these; what is on any other, only this machine sees.
_SHARED_FILESYSTEMS = (
    "9p afs beegfs ceph cifs fuse.ceph fuse.ceph-fuse fuse.glusterfs fuse.juicefs fuse.sshfs gfs2 "
    "gpfs lustre nfs nfs4 ocfs2 panfs smb3 virtiofs wekafs"
)

# What the agent's and the zygote's commands import from.
_PACKAGE = "cellmesh.workers"

State = Literal[
    "running", "detached", "starting", "stale", "leftover", "elsewhere", "unheard", "waiting",
    "broken",
]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What `cellmesh ps` knows of one mesh: its ticket, and whether its processes run.

    Attributes:
        ticket: its ticket.
        state: ``running``; ``detached``: it runs, and nobody is attached; ``starting``: its agent
            has not signed the ticket yet; ``stale``: nothing of it runs, only its directory is
            left; ``leftover``: its agent is gone, but not all its processes; ``elsewhere``: its
            agent is not seen here, and it may run on another host or in a container;
            ``unheard``: none of its agents on other hosts answers; ``waiting``: it is no mesh, but
            the zygote that a notebook keeps for its next one; ``broken``: its ticket names what
            cannot be.
        pids: its processes; the agent first where it runs.
        age_s: seconds since it was started.
        holder: who holds it, or did last; None if that is not known.
        unheard: of a mesh on many hosts, those whose agents do not answer.
        problem: why the ticket is broken.
    """

    ticket: Ticket
    state: State
    pids: tuple[int, ...]
    age_s: float
    holder: Holder | None = None
    unheard: tuple[str, ...] = ()
    problem: str = ""

    @property
    def living(self) -> bool:
        """Whether processes of the mesh run, or are about to start."""
        return self.state in ("running", "starting", "detached")

    def lease_left_s(self, now: float) -> float | None:
        """How long the mesh lives without a controller, in seconds; None if one is attached."""
        if self.state != "detached" or self.holder is None:
            return None
        return max(0.0, self.holder.since + self.ticket.lease_s - now)


def find_meshes(root: Path) -> list[Found]:
    """Return the meshes under a root, oldest first.

    Args:
        root: as `runtime_root` gives.
    """
    # Tickets first: processes that start later than the look at /proc must not be missed as gone.
    tickets = find_tickets(root)
    if not tickets:
        return []
    # Another host may have put a ticket there, whose processes cannot be seen from here.
    shared = is_shared(root)
    carriers = _carriers(tickets)
    found = []
    for ticket in tickets:
        try:
            found.append(_find(ticket, carriers.get(str(ticket.path), []), root, shared))
        except Exception as error:  # its values may be any: a key that is none, a port that is none
            problem = f"{type(error).__name__}: {error}"
            found.append(Found(ticket, "broken", (), 0.0, problem=problem))
    return found


def _find(ticket: Ticket, pids: list[int], root: Path, shared: bool) -> Found:
    age_s = max(0.0, time.time() - ticket.created_at)
    if ticket.spans_hosts:
        found = _find_by_agents(ticket)
        if found.state in ("stale", "unheard") and _is_moved(ticket, root):
            return Found(ticket, "elsewhere", (), age_s)
        return found
    state = classify(ticket, pids, age_s)
    # Nothing is called stale, and so removed, that may live on another host or in a container.
    if state == "stale" and (
        shared or not _is_of_here(ticket) or _is_moved(ticket, root) or _answers(ticket)
    ):
        state = "elsewhere"
    holder = read_holder(ticket)
    if state == "running":
        pids = [ticket.agent_pid, *children_of(ticket.agent_pid)]
        if holder is not None and not holder.is_attached:
            state = "detached"
    return Found(ticket, state, tuple(pids), age_s, holder)


def _find_by_agents(ticket: Ticket) -> Found:
    """Ask the agents on other hosts, where the mesh's processes are."""
    age_s = max(0.0, time.time() - ticket.created_at)
    own = read_holder(ticket)  # what the notebook's own listener has refused
    if not ticket.agents:  # they are being started by this process
        is_starting = age_s < STARTING_S or psutil.pid_exists(ticket.controller_pid)
        is_starting &= not marks.is_dead(ticket)
        return Found(ticket, "starting" if is_starting else "stale", (), age_s, own)
    standings = ask_agents(ticket)
    holder = summarize(standings, own)
    unheard = tuple(each.agent.name for each in standings if each.standing is None)
    if holder is not None:
        return Found(
            ticket, "running" if holder.is_attached else "detached", (), age_s, holder, unheard
        )
    has_ended = all(each.has_ended for each in standings)
    if psutil.pid_exists(ticket.controller_pid) and ticket.place == this_place():
        # A firewall that was closed since refuses connections as a host does where nothing listens.
        return Found(ticket, "unheard", (), age_s, own, unheard)
    return Found(ticket, "stale" if has_ended else "unheard", (), age_s, None, unheard)


def find_waiting(root: Path) -> list[Found]:
    """Return the zygotes that wait for meshes of notebooks, as meshes without ranks and
    directory.

    Args:
        root: as `runtime_root` gives.
    """
    found = []
    for process in psutil.process_iter():
        try:
            # A guardian that has just been forked has its parent's arguments for some milliseconds.
            kernel_pid = (
                kernel_of(root, process.cmdline()) if process.uids().real == os.getuid() else 0
            )
            if kernel_pid == 0 or process.ppid() != kernel_pid:
                continue
            ticket = Ticket(
                name=f"zygote-of-{kernel_pid}",
                key=Secret(""),
                directory="",
                num_ranks=0,
                backend="",
                mesh_dim_names=(),
                mesh_shape=(),
                preload=(),
                sys_path=(),
                cwd=psutil.Process(kernel_pid).cwd(),
                controller_pid=kernel_pid,
                created_at=process.create_time(),
            )
        except psutil.Error:
            continue
        found.append(
            Found(ticket, "waiting", (process.pid,), max(0.0, time.time() - ticket.created_at))
        )
    return found


def classify(ticket: Ticket, pids: Iterable[int], age_s: float) -> State:
    """Decide from the processes and sockets visible on this host whether a mesh runs, is starting,
    or is dead.

    Args:
        ticket: its ticket.
        pids: its processes.
        age_s: seconds since the ticket was made.
    """
    pids = set(pids)
    if ticket.agent_pid in pids:
        return "running"
    if ticket.agent_pid == 0 and (pids or age_s < STARTING_S):
        return "starting"
    return "leftover" if pids else "stale"


def processes_of(ticket: Ticket) -> set[int]:
    """Return the processes of a mesh on this host, without zombies."""
    pids = set(_carriers([ticket]).get(str(ticket.path), []))
    return pids.union(children_of(ticket.agent_pid)) if ticket.agent_pid in pids else pids


def _carriers(tickets: Sequence[Ticket]) -> dict[str, list[int]]:
    """Return this user's processes that belong to a mesh, by the mesh's ticket: processes with the
    ticket's path in their arguments, or with its mark in their environment.
    """
    wanted = {str(ticket.path) for ticket in tickets}
    carriers: dict[str, list[int]] = {
        str(ticket.path): marks.carriers(marks.value_of(ticket.mark)) for ticket in tickets
    }
    uid = os.getuid()
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline() if process.uids().real == uid else []
            if any(
                _PACKAGE in argument for argument in arguments
            ):  # and no editor that has the file open
                for path in wanted.intersection(arguments):
                    if process.pid not in carriers[path]:
                        carriers[path].append(process.pid)
        except psutil.Error:
            continue
    return carriers


def _is_of_here(ticket: Ticket) -> bool:
    """Whether a ticket was written on this host, in this boot or an earlier one."""
    here = this_place()
    if ticket.place.host != here.host:
        return False
    return ticket.place.boot != here.boot or ticket.place.pid_namespace == here.pid_namespace


def _is_moved(ticket: Ticket, root: Path) -> bool:
    """Whether a ticket found under this root names another directory as its own; a container that
    mounts the directory elsewhere writes such tickets.
    """
    return os.path.realpath(root) != os.path.realpath(Path(ticket.directory).parent)


def _answers(ticket: Ticket) -> bool:
    """Whether a process listens on the agent's socket, even if it is not visible from here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(ticket.agent_endpoint.removeprefix("ipc://"))
        except BlockingIOError:  # its queue is full, so it has one
            return True
        except OSError:
            return False
    return True


def is_shared(path: Path) -> bool:
    """Return whether a path is on a file system that other hosts may have mounted too."""
    real = path.resolve()
    above = [
        (len(mount.mountpoint), mount.fstype)
        for mount in psutil.disk_partitions(all=True)
        if real.is_relative_to(mount.mountpoint)
    ]
    # Of several at one point, the last hides the others.
    return max(reversed(above), key=lambda each: each[0])[1] in _SHARED_FILESYSTEMS.split()


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
    if found.state == "leftover" and marks.is_dead(found.ticket):
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
