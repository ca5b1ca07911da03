"""Starts an agent on this machine, or finds one that runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ....errors import HostError
from ....wire.descriptors import wait_readable
from ....wire.environment import choose_gpus
from ....wire.host import is_process, started_ticks
from ....wire.hosts import Host
from ....wire.interpreter import isolated_command
from ....wire.options import MeshOptions
from ....wire.ticket import (
    Ticket,
    make_directory,
    new_key,
    remove_directory,
    runtime_root,
    write_ticket,
)
from ...code_files.scan import user_roots
from ...kernel import own_notebook
from ...options import Options
from .prestart import Prestart


class Launcher:
    """Starts the agents of a mesh, one a host, and watches and signals what runs of them here.

    Args:
        ticket: the mesh's, with the addresses of its agents as they are now.

    Attributes:
        ticket: likewise.
        unheard: the places of the agents that were started by another process, and not reached.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.unheard: tuple[int, ...] = ()

    def start(self) -> int:
        """Start the agents.

        Returns:
            A descriptor that can be read once the agent has ended; the caller closes it.

        Raises:
            HostError: an agent could not be started.
        """
        raise NotImplementedError

    def poll(self) -> bool:
        """Whether anything runs by which agents were started."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the agents, and of what started them; False if they go on.

        Args:
            timeout_s: how long, in seconds; None for as long as it takes.
        """
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Send a signal to what `poll` asks for, unless it has ended."""
        raise NotImplementedError

    def describe(self) -> str:
        """Where the agents run."""
        raise NotImplementedError

    def note_resized(
        self, layout: Sequence[int], dims: Mapping[str, int], new: Sequence[Host]
    ) -> None:
        """Note the mesh's new number of ranks and its hosts.

        Raises:
            HostError: that cannot be written; nothing has changed.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Have the agents go on, whatever becomes of this process: the mesh is ready."""

    def leave(self) -> None:
        """Close what this process has open for the agents, which go on or have ended."""

    def start_again(
        self, names: Mapping[int, str], given_up: Collection[int] = ()
    ) -> dict[int, HostError]:
        """Start agents in place of lost ones, all at once, and put the addresses of those that
        start into `ticket`. Blocks.

        Args:
            names: index of a lost host -> the host to start its agent on.
            given_up: the indices of lost hosts whose agents are ended even if they live.

        Returns:
            The errors of those that could not be started, by the index of the lost host.
        """
        return {}

    def check_may_join(self, names: Iterable[str]) -> None:
        """Check that hosts can join a mesh that was started so.

        Raises:
            MeshUsageError: there are some, and they cannot.
        """

    def start_more(self, layout: Sequence[int], hosts: Sequence[Host]) -> list[Host]:
        """Start agents on more hosts, and return where they are reached. Blocks.

        Args:
            layout: how many ranks each host has then.
            hosts: those that are new, the last of `layout`.

        Raises:
            HostError: one could not be started; those that were have been ended.
            MeshUsageError: no hosts can join, or one is in the mesh.
        """
        return []

    def forget(self, agents: Sequence[Host]) -> None:
        """Close what leads to agents that `start_more` has started and that have ended."""


def ranks_environment(options: Options) -> dict[str, str]:
    """Return the environment variables that ranks get besides those of their host.

    Raises:
        HostError: a GPU was asked for that this host, on which the mesh runs, was not given.
    """
    if options.hosts:  # each of which chooses GPUs among its own
        return dict(options.env)
    return {**options.env, **choose_gpus(options.gpus, os.environ)}


def make_ticket(options: Options) -> Ticket:
    """Make a mesh's directory and ticket.

    Args:
        options: what to start.

    Returns:
        The ticket, written.

    Raises:
        HostError: the runtime directory cannot be used, or a GPU was not given to this
            host, or the working directory was removed.
    """
    environment = ranks_environment(options)
    sys_path = [path for path in sys.path if isinstance(path, str)]
    try:
        cwd = os.getcwd()
    except OSError as error:
        raise HostError(
            "the working directory of this process was removed, and ranks begin in it: change to "
            "another (`%cd ~`, os.chdir), or make it again and change to it"
        ) from error
    if options.hosts:
        sys_path = [path or cwd for path in sys_path]
    name = options.name or f"mesh-{os.getpid()}-{secrets.token_hex(2)}"
    directory = make_directory(runtime_root(), name)
    carried = {field: getattr(options, field) for field in MeshOptions.__struct_fields__}
    ticket = Ticket(
        **carried | {"name": name, "env": environment},
        key=new_key(),
        directory=str(directory),
        num_ranks=options.num_ranks,
        mesh_dim_names=tuple(options.mesh),
        mesh_shape=tuple(options.mesh.values()),
        sys_path=tuple(sys_path),
        cwd=cwd,
        controller_pid=os.getpid(),
        created_at=time.time(),
        roots=user_roots(sys_path) if options.hosts and options.sync else (),
        notebook=own_notebook(),
    )
    try:
        write_ticket(ticket)
    except BaseException:
        remove_directory(directory)
        raise
    return ticket


# What a start writes, beside logs.
_LITTLE_BYTES = 64 << 10
# How long a guardian may take to end the processes that its agent has left.
_GUARDIAN_S = 5.0


@dataclass(frozen=True)
class Process:
    """A process of this machine, a child of this process or not.

    Attributes:
        pid: its number.
        ticks: when it started (`wire.host.started_ticks`); 0 where it had ended already.
    """

    pid: int
    ticks: int

    def open(self) -> int:
        """Open a pidfd of the process.

        Raises:
            ProcessLookupError: it has ended.
        """
        if self.ticks:
            pidfd = os.pidfd_open(self.pid)
            if is_process(self.pid, self.ticks):
                return pidfd
            os.close(pidfd)  # another process has its number
        raise ProcessLookupError(f"process {self.pid} has ended")

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the process's end; False if it has not ended in time."""
        try:
            pidfd = self.open()
        except ProcessLookupError:
            return True
        try:
            return bool(wait_readable([pidfd], timeout_s))
        finally:
            os.close(pidfd)


@dataclass(frozen=True)
class Started:
    """The agent of a mesh that was started on this machine, and how to wait for its parent, the
    guardian.

    Attributes:
        agent: its process.
        wait_for_guardian: waits so many seconds for the end of the agent's parent.
    """

    agent: Process
    wait_for_guardian: Callable[[float], object] = lambda timeout_s: None


class LocalAgent(Launcher):
    """The launcher of an agent on this machine.

    Args:
        ticket: of the mesh.
        begin: starts the agent's process, or finds it: `spawned`, `forked` or `found`.
    """

    def __init__(self, ticket: Ticket, begin: Callable[[Ticket], Started]) -> None:
        super().__init__(ticket)
        self._begin = begin
        self._started: Started | None = None

    @property
    def _agent(self) -> Process:
        return self._started.agent if self._started is not None else Process(0, 0)

    def start(self) -> int:
        """Start the agent; as `Launcher.start`.

        Raises:
            HostError: it could not be started, or there is none.
        """
        self._started = self._begin(self.ticket)
        try:
            return self._agent.open()
        except ProcessLookupError as error:
            raise HostError(f"the agent has ended: {error}") from None

    def poll(self) -> bool:
        """Whether the agent runs."""
        return is_process(self._agent.pid, self._agent.ticks)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the agent and its guardian; False if it has not ended in time."""
        has_ended = self._agent.wait(timeout_s)
        if has_ended and self._started is not None:
            self._started.wait_for_guardian(_GUARDIAN_S)  # or something hangs in the kernel
        return has_ended

    def signal(self, number: int) -> None:
        """Send the agent a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = self._agent.open()
            try:
                signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)

    def note_resized(
        self, layout: Sequence[int], dims: Mapping[str, int], new: Sequence[Host]
    ) -> None:
        """As `Launcher.note_resized`: the agent writes the ticket."""
        self.ticket = msgspec.structs.replace(
            self.ticket, num_ranks=sum(layout), num_resizes=self.ticket.num_resizes + 1
        )

    def describe(self) -> str:
        """Where the agent runs, and as which process."""
        return f"process {self._agent.pid} on this machine"


def found(ticket: Ticket) -> Started:
    """Return the agent of a running mesh."""
    return Started(Process(ticket.agent_pid, ticket.agent_ticks))


def command_of(ticket: Ticket) -> list[str]:
    """The command line of a mesh's guardian, which forks the agent."""
    return isolated_command("cellmesh.workers.agent.guardian", str(ticket.path))


def spawned(ticket: Ticket) -> Started:
    """Start an agent with a new interpreter in a new session, because Jupyter signals the
    kernel's process group.

    Raises:
        HostError: it could not be started; the ticket's directory is removed.
    """
    guardian = None
    try:
        with _agent_log(ticket) as log:
            guardian = subprocess.Popen(
                command_of(ticket),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        with guardian.stdout:  # type: ignore[union-attr]
            agent = _living(int(guardian.stdout.readline().split()[1]))  # type: ignore[union-attr]
        # The mesh may outlive our interest in it: whenever it ends, its guardian is collected.
        reaper = threading.Thread(target=guardian.wait, name="cellmesh-reaper", daemon=True)
        reaper.start()
        return Started(agent, reaper.join)
    except BaseException as e:
        log_text = read_agent_log(ticket)
        if guardian is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guardian.pid, signal.SIGKILL)
            guardian.wait()
        remove_directory(Path(ticket.directory))
        if isinstance(e, OSError | IndexError):
            raise HostError(f"cannot start the agent ({sys.executable}): {log_text or e}") from e
        raise


def forked(ticket: Ticket, prestart: Prestart) -> Started:
    """Start an agent from the zygote that waits in the background.

    Raises:
        HostError: that failed; the ticket's directory is removed.
    """
    try:
        with _agent_log(ticket) as log:
            guardian, agent = map(_living, prestart.start(ticket, log.fileno()))
        return Started(agent, guardian.wait)
    except BaseException as error:
        remove_directory(Path(ticket.directory))
        if isinstance(error, OSError):  # no descriptor is free, or the agent has ended at once
            raise HostError(f"cannot fork the agent from a waiting zygote: {error}") from error
        raise


def read_agent_log(ticket: Ticket) -> str:
    """Return the end of the agent's error log; "" if there is none."""
    try:
        return (ticket.logs / "agent.log").read_text(errors="replace")[-2000:].strip()
    except OSError:
        return ""


def describe_full_disk(ticket: Ticket) -> str:
    """Say that the disk of a mesh's directory is full, where an agent cannot even write why it has
    ended; "" if it is not.
    """
    parent = Path(ticket.directory).parent  # the guardian may have removed the directory itself
    try:
        disk = os.statvfs(parent)
    except OSError:
        return ""
    left = disk.f_bavail * disk.f_frsize
    if left >= _LITTLE_BYTES:
        return ""
    return (
        f"Of the disk of {parent} {left >> 10} kB are left: free some space, or set "
        "JUPYTER_RUNTIME_DIR to a directory on another disk"
    )


def _agent_log(ticket: Ticket) -> BinaryIO:
    path = ticket.logs / "agent.log"
    return open(path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))


def _living(pid: int) -> Process:
    if not (ticks := started_ticks(pid)):
        raise ProcessLookupError(f"process {pid} has ended")
    return Process(pid, ticks)
