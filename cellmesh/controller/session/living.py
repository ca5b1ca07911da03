"""Finds the meshes of this user by their ticket files, and ends them: for `cellmesh ps` and `stop`,
and for notebooks, which list meshes and attach to them.

A process belongs to a mesh if it is the agent, the agent's guardian, a descendant of the agent, or
carries the mesh's mark (`wire.marks`); its process number alone is no proof.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ...errors import HostError, MeshUsageError, NoMeshError, did_you_mean
from ...wire import marks
from ...wire.host import format_span, is_process, this_place
from ...wire.ranks import in_words
from ...wire.ticket import (
    Holder,
    Ticket,
    find_strange,
    find_tickets,
    read_holder,
    read_ticket,
    remove_own_directory,
    runtime_root,
)
from ...wire.waiting import sweep
from ..kernel import own_notebook
from .standing import ask_agents, describe_left, end_agents, summarize

if TYPE_CHECKING:
    import psutil

# The agent waits a second for ranks to exit, then kills them.
_PATIENCE_S = 5.0
_KILL_S = 2.0

State = Literal["running", "detached", "starting", "dead", "elsewhere", "unheard"]


class FoundMesh(msgspec.Struct, frozen=True):
    """A mesh whose ticket file is on this machine, with its state.

    Attributes:
        ticket: its ticket.
        state: ``running``; ``detached``: it runs without a controller; ``starting``: its agent has
            not signed the ticket yet; ``dead``: its agents have ended, and it can be removed;
            ``elsewhere``: its agent is not visible here, and may run on another host or in a
            container; ``unheard``: none of its agents on other hosts has answered, or was asked.
        holder: the process that holds it, or held it last; None if that is not known.
        unheard: names of the hosts whose agents have not answered, for a mesh on many hosts.
    """

    ticket: Ticket
    state: State
    holder: Holder | None = None
    unheard: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the mesh."""
        return self.ticket.name

    @property
    def is_living(self) -> bool:
        """Whether processes of the mesh run, or are about to start."""
        return self.state in ("running", "detached", "starting")

    @property
    def is_free(self) -> bool:
        """Whether no process controls the mesh; if its agents do not answer, whether the process
        that started the mesh has ended.
        """
        if self.holder is not None:
            return not self.holder.is_attached
        is_elsewhere = self.ticket.place != this_place()
        starter = Path(f"/proc/{self.ticket.controller_pid}")
        return self.ticket.spans_hosts and not is_elsewhere and not starter.exists()

    @property
    def notebook(self) -> str:
        """The path of the notebook that controls the mesh, or controlled it last
        (`kernel.own_notebook`).
        """
        return self.ticket.notebook if self.holder is None else self.holder.notebook

    def is_of(self, notebook: str) -> bool:
        """Return whether the notebook of this path controls the mesh, or controlled it last."""
        return bool(notebook) and self.notebook == notebook

    def lease_left_s(self, now: float) -> float | None:
        """Return the seconds that a mesh without a controller still runs (its lease); None if it
        has a controller.
        """
        if self.state != "detached" or self.holder is None:
            return None
        return max(0.0, self.holder.since + self.ticket.lease_s - now)


def find_meshes(root: Path, asks: bool = True) -> list[FoundMesh]:
    """Return the meshes whose tickets are under a runtime directory, oldest first.

    Args:
        root: directory of all meshes, as `runtime_root` returns it.
        asks: whether to ask agents on other hosts; else only files are read.
    """
    return [look_at(ticket, root, asks) for ticket in find_tickets(root)]


def look_at(ticket: Ticket, root: Path, asks: bool = True) -> FoundMesh:
    """Look up the present state of the mesh that a ticket is of.

    Args:
        ticket: its ticket, as found under the root.
        root, asks: as for `find_meshes`.
    """
    if os.path.realpath(root) != os.path.realpath(Path(ticket.directory).parent):
        return FoundMesh(ticket, "elsewhere")  # a container mounts the directory elsewhere
    if ticket.spans_hosts and ticket.agents:
        return _look_through_agents(ticket) if asks else FoundMesh(ticket, "unheard")
    if marks.is_dead(ticket):
        return FoundMesh(ticket, "dead")
    if ticket.place != this_place():
        return FoundMesh(ticket, "elsewhere")
    holder = read_holder(ticket)
    if not ticket.agent_pid:
        return FoundMesh(ticket, "starting", holder)
    return FoundMesh(ticket, _state_of(holder), holder)


def _look_through_agents(ticket: Ticket) -> FoundMesh:
    own = read_holder(ticket)  # counts the peers that the notebook's listener has refused
    try:
        standings = ask_agents(ticket)
    except Exception:  # the ticket has impossible values, such as a key or a port
        return FoundMesh(ticket, "unheard", own, tuple(agent.name for agent in ticket.agents))
    unheard = tuple(each.agent.name for each in standings if each.standing is None)
    if (holder := summarize(standings, own)) is not None:
        return FoundMesh(ticket, _state_of(holder), holder, unheard)
    # A firewall that was closed since refuses connections like a host without a listener.
    is_held = os.path.exists(f"/proc/{ticket.controller_pid}") and ticket.place == this_place()
    is_dead = all(each.has_ended for each in standings) and not is_held
    return FoundMesh(ticket, "dead" if is_dead else "unheard", own if is_held else None, unheard)


def _state_of(holder: Holder | None) -> State:
    return "running" if holder is None or holder.is_attached else "detached"


def find_living(asks: bool) -> list[FoundMesh]:
    """Return the meshes of this user that can be attached to, oldest first.

    Args:
        asks: whether to ask agents on other hosts; else their meshes count as living.
    """
    states = ("running", "detached") if asks else ("running", "detached", "unheard")
    found = find_meshes(runtime_root(), asks)
    return [mesh for mesh in found if mesh.state in states and mesh.ticket.host is None]


def missing(name: str | None, names: Collection[str]) -> NoMeshError:
    """Return the error that there is no mesh of a name, or none at all, but those of `names`."""
    text = "no mesh is running" if name is None else f"there is no mesh {name!r}"
    there = f" (running: {', '.join(names)})" if names else ""
    start = "" if names else ": `%dist_start 4` or cellmesh.start() starts one"
    strange = "".join(f"; {why}" for _, why in find_strange(runtime_root()))
    return NoMeshError(f"{text}{did_you_mean(name or '', names)}{there}{start}{strange}")


def left_meshes(asks: bool) -> list[FoundMesh]:
    """Return the meshes without a controller that this notebook may have left running: its own, and
    those that were started in its folder, unless they are another notebook's.

    Args:
        asks: whether to ask the agents of a mesh on many hosts; for one host, files suffice.
    """
    own = own_notebook()
    left = [mesh for mesh in find_living(asks=False) if mesh.is_free and _is_near(mesh, own)]
    if asks and any(mesh.ticket.spans_hosts for mesh in left):
        names = {mesh.name for mesh in left}
        return [mesh for mesh in find_living(asks=True) if mesh.name in names and mesh.is_free]
    return left


def advise_left(mesh: FoundMesh) -> str:
    """Return a line for users on a mesh that runs on without a controller, with the commands to
    attach to it or end it.
    """
    return (
        f"{describe(mesh, time.time())}; `%dist_attach {mesh.name}` has it again, `%dist_stop "
        f"{mesh.name}` ends it"
    )


def choose(living: Sequence[FoundMesh], steal: bool) -> FoundMesh | None:
    """Return the mesh to attach to if the user has named none: the only mesh, else the only one of
    this notebook without a controller, else the only one without a controller; None if there is no
    such mesh.

    Args:
        living: the meshes.
        steal: whether to choose a mesh that a process holds instead of a free one.
    """
    if len(living) == 1:
        return living[0]
    fit = [mesh for mesh in living if mesh.is_free != steal]
    own = own_notebook()
    for candidates in ([mesh for mesh in fit if mesh.is_of(own)], fit):
        if len(candidates) == 1:
            return candidates[0]
    return None


def describe(mesh: FoundMesh, now: float) -> str:
    """Return a line for users on a mesh: its ranks, age, notebook and controller."""
    ticket = mesh.ticket
    place = mesh.notebook if _is_named(mesh.notebook) else ticket.cwd
    age = format_span(max(0.0, now - ticket.created_at))
    return (
        f"{mesh.name}: {in_words(ticket.num_ranks)}, started {age} ago in {place}, held by "
        f"{_hold(mesh, now)}"
    )


def end_left(mesh: FoundMesh) -> None:
    """End a mesh, or raise an error if a process controls it. Blocks.

    Raises:
        MeshUsageError: another process holds it.
        HostError: some of its hosts did not answer, or a process or its directory still exists.
    """
    name = mesh.name
    if mesh.holder is not None and mesh.holder.is_attached:
        raise MeshUsageError(
            f"{name} is held by {_hold(mesh, time.time())}: `%dist_attach --steal {name}` takes "
            f"it, `cellmesh stop {name}` in a terminal ends it all the same"
        )
    end(mesh)


def end(mesh: FoundMesh) -> bool:
    """End a mesh, and remove its directory. Blocks.

    On this machine, sends SIGTERM to the mesh's agent and SIGKILL to processes that do not end.

    Args:
        mesh: the mesh.

    Returns:
        Whether no process had to be killed.

    Raises:
        HostError: some of its hosts did not answer, or a process or the directory still exists.
    """
    import psutil  # takes 7 ms here and below, and no attach needs it

    ticket = mesh.ticket
    if ticket.spans_hosts and mesh.state != "dead":
        if left_there := end_agents(ticket, _PATIENCE_S):
            raise HostError(describe_left(ticket, left_there))
        remove_own_directory(ticket)
        return True
    processes = processes_of(ticket)
    agent = [process for process in processes if process.pid == ticket.agent_pid]
    signal_all(agent, signal.SIGTERM)
    # Others end after the agent.
    _, left = psutil.wait_procs(processes, _PATIENCE_S if agent else 0)
    signal_all(left, signal.SIGKILL)
    psutil.wait_procs(left, _KILL_S)
    marks.end_carriers(marks.value_of(ticket.mark))  # a killed process may have forked in between
    if remaining := ", ".join(str(process.pid) for process in processes_of(ticket)):
        raise HostError(
            f"processes of {ticket.name} do not end even when killed: {remaining}. A driver or a "
            "file system hangs: try again later, else the host must be restarted"
        )
    if not remove_own_directory(ticket) and os.path.lexists(ticket.directory):
        raise HostError(
            f"{ticket.directory} has other files than this mesh's, or cannot be removed: look at it"
        )
    return not left


def forget_if_dead(name: str, but: str = "") -> None:
    """Remove the remaining processes and files of the mesh of this name if its agents have ended.
    Blocks.

    Args:
        name: name of the mesh.
        but: mark of a mesh to leave alone; "" for none.
    """
    root = runtime_root()
    with contextlib.suppress(HostError):  # there is none
        ticket = read_ticket(root / name / "ticket.json")
        if ticket.mark != but and (mesh := look_at(ticket, root)).state == "dead":
            end(mesh)


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to processes, except those that have ended."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def processes_of(ticket: Ticket) -> list[psutil.Process]:
    """Return the processes of a mesh on this host, the agent first if it runs."""
    import psutil

    pids: list[int] = []
    if is_process(ticket.agent_pid, ticket.agent_ticks):
        with contextlib.suppress(psutil.Error):
            agent = psutil.Process(ticket.agent_pid)
            apart = [each for each in agent.children() if marks.is_apart(each.pid, ticket.mark)]
            others = [*apart, *(below for each in apart for below in each.children(recursive=True))]
            below = [each for each in agent.children(recursive=True) if each not in others]
            pids = [agent.pid, *(each.pid for each in below)]
            guardian = agent.parent()
            if guardian is not None and str(ticket.path) in guardian.cmdline():
                pids.append(guardian.pid)
    found = []
    for pid in dict.fromkeys([*pids, *marks.carriers(marks.value_of(ticket.mark))]):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find_waiting(root: Path) -> list[psutil.Process]:
    """Return the zygotes that wait for the next mesh of a notebook or a shell.

    Args:
        root: directory of all meshes, as `runtime_root` returns it.
    """
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_own = process.uids().real == os.getuid()
            kernel_pid = marks.kernel_of(root, process.cmdline()) if is_own else None
            parent = process.parent() if kernel_pid is not None else None
            # A guardian that has just been forked has its parent's arguments for some milliseconds.
            is_forked = parent is not None and marks.kernel_of(root, parent.cmdline()) == kernel_pid
            if kernel_pid is not None and not is_forked:
                found.append(process)
    sweep()
    return found


def end_waiting(processes: Sequence[psutil.Process]) -> None:
    """End zygotes (`find_waiting`); meshes that were forked from them run on. Blocks."""
    import psutil

    signal_all(processes, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=_KILL_S)
    sweep()


def describe_waiting(process: psutil.Process, root: Path) -> tuple[str, int]:
    """Return the mesh that a zygote waits for (`find_waiting`), for users, and its memory in bytes
    with that of the copies which serve in its place.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        is_of_shells = marks.kernel_of(root, process.cmdline()) == 0
        below = process.children(recursive=True)
        # A rank, which is forked from it as well, has another name.
        copies = [each for each in below if "cellmesh-preload" in "".join(each.cmdline()[:1])]
        aim = "the next `cellmesh run`" if is_of_shells else "the next mesh of its notebook"
        return aim, memory_bytes([process, *copies])
    return "nothing, as it has ended", 0


def _is_near(mesh: FoundMesh, own: str) -> bool:
    if mesh.is_of(own):
        return True
    if _is_named(own) and _is_named(mesh.notebook):
        return False
    try:
        return mesh.ticket.cwd == os.getcwd()
    except OSError:  # it was removed
        return False


def _is_named(notebook: str) -> bool:
    """Return whether a name is a notebook's path, not a kernel's connection file or empty."""
    return bool(notebook) and not notebook.endswith(".json")


def _hold(mesh: FoundMesh, now: float) -> str:
    holder = mesh.holder
    if holder is None:
        return "nobody, if it lives" if mesh.is_free else f"process {mesh.ticket.controller_pid}"
    if not holder.is_attached:
        return f"nobody, and lives on for {format_span(mesh.lease_left_s(now) or 0.0)}"
    if holder.controller_pid == os.getpid():
        return "this process"
    where = f" on {holder.host}" if mesh.ticket.spans_hosts and holder.host else ""
    return f"process {holder.controller_pid}{where}"


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of processes that have not ended, shared pages counted once (PSS)."""
    import psutil

    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total
