"""Finds meshes by their tickets, determines their states from their processes, and ends them.

A mesh's guardian, agent, zygote and store have the ticket's path among their arguments (as forks of
one another); ranks and the processes that they start have the mesh's mark in their environment. A
process belongs to the mesh if it has either or is a descendant of the agent; its process number
alone is no proof.

Signals are sent through pidfds, as a process number may be reused.
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

# The agent waits a second for ranks to exit, then kills them.
PATIENCE_S = 5.0
_LEAVE_S, _KILL_S, _MAX_ROUNDS = 1.0, 2.0, 4
# File systems that several hosts may mount; files on all others are visible to this machine only.
_SHARED_FILESYSTEMS = (
    "9p afs beegfs ceph cifs fuse.ceph fuse.ceph-fuse fuse.glusterfs fuse.juicefs fuse.sshfs gfs2 "
    "gpfs lustre nfs nfs4 ocfs2 panfs smb3 virtiofs wekafs"
)

# The package that the commands of agent and zygote import.
_PACKAGE = "cellmesh.workers"

State = Literal[
    "running", "detached", "starting", "stale", "leftover", "elsewhere", "unheard", "waiting",
    "broken",
]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A mesh as `cellmesh ps` finds it: its ticket and the state of its processes.

    Attributes:
        ticket: ticket of the mesh.
        state: ``running``; ``detached``: it runs without a controller; ``starting``: its agent
            has not signed the ticket yet; ``stale``: none of its processes runs, only its directory
            exists; ``leftover``: its agent has ended, some other processes have not;
            ``elsewhere``: its agent is not visible here, and may run on another host or in a
            container; ``unheard``: none of its agents on other hosts answers; ``waiting``: not a
            mesh, but the zygote that a notebook keeps for its next one; ``broken``: its ticket has
            invalid values.
        pids: process ids of the mesh; the agent's first if it runs.
        age_s: seconds since the start of the mesh.
        holder: current or last controller of the mesh; None if unknown.
        unheard: names of the hosts whose agents do not answer, for a mesh on many hosts.
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
        """Remaining lease of a mesh without a controller, in seconds; None if one is attached."""
        if self.state != "detached" or self.holder is None:
            return None
        return max(0.0, self.holder.since + self.ticket.lease_s - now)


def find_meshes(root: Path) -> list[Found]:
    """Return the meshes under a runtime directory, oldest first.

    Args:
        root: directory of all meshes, as `runtime_root` returns it.
    """
    # Tickets are read before /proc: else a mesh that starts in between would look dead.
    tickets = find_tickets(root)
    if not tickets:
        return []
    # Another host may have written a ticket there, and its processes are not visible from here.
    shared = is_shared(root)
    carriers = _carriers(tickets)
    found = []
    for ticket in tickets:
        try:
            found.append(_find(ticket, carriers.get(str(ticket.path), []), root, shared))
        except Exception as error:  # a ticket may hold invalid values, such as a key or a port
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
    # A stale mesh is removed, so one that may live on another host or in a container is not stale.
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
    """Determine the state of a mesh on many hosts by asking its agents."""
    age_s = max(0.0, time.time() - ticket.created_at)
    own = read_holder(ticket)  # counts the peers that the notebook's listener has refused
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
        # A firewall that was closed since refuses connections like a host without a listener.
        return Found(ticket, "unheard", (), age_s, own, unheard)
    return Found(ticket, "stale" if has_ended else "unheard", (), age_s, None, unheard)


def find_waiting(root: Path) -> list[Found]:
    """Return the zygotes that wait for the next mesh of a notebook, as meshes without ranks and
    directory.

    Args:
        root: directory of all meshes, as `runtime_root` returns it.
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
        ticket: ticket of the mesh.
        pids: process ids of the mesh on this host.
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
            ):  # not an editor that has the ticket open
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
    return max(reversed(above), key=lambda each: each[0], default=(0, ""))[1] in (
        _SHARED_FILESYSTEMS.split()
    )


def end(found: Found, patience_s: float = PATIENCE_S) -> bool:
    """End a mesh, or a zygote that waits for a notebook's next mesh. Blocks.

    Sends SIGTERM to the mesh's agent or to the zygote, SIGKILL to processes that do not end, and
    removes the mesh's directory.

    Args:
        found: mesh or zygote, as `find_meshes` or `find_waiting` returns it.
        patience_s: time until the agent or zygote is killed, in seconds.

    Returns:
        Whether no process had to be killed.

    Raises:
        HostError: a process or the directory still exists.
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
    for _ in range(_MAX_ROUNDS):  # a killed process may have forked in between
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
        if process.create_time() == found.ticket.created_at:  # else the number was reused
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
        HostError: a process or the directory still exists.
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
    # The others end by themselves after the agent, unless they hang.
    if _wait(pidfds.values(), _LEAVE_S):
        return orderly
    for pidfd in pidfds.values():
        _signal(pidfd, signal.SIGKILL)
    _wait(pidfds.values(), _KILL_S)
    return False


@contextlib.contextmanager
def _watched(ticket: Ticket) -> Iterator[dict[int, int]]:
    """Open a pidfd for each process of the mesh, and close them at the end: pid -> pidfd."""
    pidfds: dict[int, int] = {}
    try:
        for pid in processes_of(ticket):
            try:
                pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
        # A process number may have been reused before its pidfd was opened, but not since.
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
