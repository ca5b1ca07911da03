"""Starts an agent on this machine, or finds a running one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from ....errors import HostError
from ....wire import marks
from ....wire.environment import choose_gpus
from ....wire.host import Process, started_ticks
from ....wire.hosts import Host
from ....wire.options import MeshOptions
from ....wire.process import isolated_command
from ....wire.ticket import (
    Ticket,
    make_directory,
    new_key,
    remove_directory,
    runtime_root,
    write_ticket,
)
from ...kernel import own_notebook
from ...options import Options, working_directory
from ...preload import learned_modules, own_list
from .prestart import Prestart


class Launcher:
    """Base class of launchers, which start the agents of a mesh, one a host, and wait for and
    signal the processes of this machine that the agents depend on.

    Args:
        ticket: ticket of the mesh, with the present addresses of its agents.

    Attributes:
        ticket: the present ticket of the mesh.
        unheard: indices of the agents that another process has started and that are out of reach.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.unheard: tuple[int, ...] = ()

    def start(self) -> int:
        """Start the agents of the mesh.

        Returns:
            A file descriptor that becomes readable at the end of the agent; the caller closes it.

        Raises:
            HostError: an agent could not be started.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the agents and the commands that have started them end; return False if one
        exceeds the time limit.

        Args:
            timeout_s: time limit in seconds; None for none.
        """
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Send a signal to the agents and commands that `wait` waits for, unless they have
        ended.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return a text for users on where the agents run."""
        raise NotImplementedError

    def note_resized(
        self, layout: Sequence[int], dims: Mapping[str, int], new: Sequence[Host]
    ) -> None:
        """Record the mesh's new number of ranks and its hosts.

        Args:
            layout: number of ranks of each host.
            dims: dims of the DeviceMesh, name -> size.
            new: the hosts that join, the last of `layout`.

        Raises:
            HostError: the ticket cannot be written; nothing has changed.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Let the agents run on even if this process ends; called once the mesh is ready."""

    def leave(self) -> None:
        """Close this launcher's resources, such as port forwardings by ssh; the agents run on or
        have ended.
        """

    def start_again(
        self, names: Mapping[int, str], given_up: Collection[int] = ()
    ) -> dict[int, HostError]:
        """Start agents in place of lost ones, all at once, and write the addresses of the started
        agents to `ticket`. Blocks.

        Args:
            names: index of a lost host -> name of the host to start an agent on.
            given_up: indices of lost hosts whose agents are ended even if they live.

        Returns:
            Index of a lost host -> error, for the agents that could not be started.
        """
        return {}

    def start_more(self, layout: Sequence[int], hosts: Sequence[Host]) -> list[Host]:
        """Start agents on more hosts, and return the hosts with the agents' addresses. Blocks.

        Args:
            layout: number of ranks of each host, including the new ones.
            hosts: the new hosts, the last of `layout`.

        Raises:
            HostError: an agent could not be started; the agents that were have been ended.
            MeshUsageError: no host can join this mesh, or one is in the mesh already.
        """
        return []


def ranks_environment(options: Options) -> dict[str, str]:
    """Return the environment variables that ranks get besides those of their host.

    Raises:
        HostError: a requested GPU is not available on this host, on which the mesh runs.
    """
    if options.hosts:  # each host chooses among its own GPUs
        return dict(options.env)
    return {**options.env, **choose_gpus(options.gpus, os.environ)}


def make_ticket(options: Options) -> Ticket:
    """Make a mesh's directory and ticket.

    Args:
        options: options of the start.

    Returns:
        The ticket, written.

    Raises:
        HostError: the runtime directory cannot be used, a requested GPU is not available, or the
            working directory was removed.
    """
    environment = ranks_environment(options)
    sys_path = [path for path in sys.path if isinstance(path, str)]
    cwd = str(working_directory())
    roots: Sequence[str] = ()
    if options.hosts:
        from ...code_files.scan import user_roots

        sys_path = [path or cwd for path in sys_path]
        roots = user_roots(sys_path) if options.sync else ()
    learned_list = own_list() if options.learns else None
    name = options.name or f"mesh-{os.getpid()}-{os.urandom(2).hex()}"
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
        roots=tuple(roots),
        notebook=own_notebook(),
        learned=learned_modules(learned_list) if learned_list is not None else (),
        learned_list=str(learned_list or ""),
    )
    try:
        write_ticket(ticket)
    except BaseException:
        remove_directory(directory)
        raise
    return ticket


# Disk space that a start needs, besides logs.
_LITTLE_BYTES = 64 << 10
# Time limit for a guardian to end the processes that its agent has left.
_GUARDIAN_S = 5.0


class LocalAgent(Launcher):
    """The launcher of an agent on this machine.

    Args:
        ticket: ticket of the mesh.
        agent: the agent's process.
        guardian: its parent, which ends after it; None if that is not known.
    """

    def __init__(self, ticket: Ticket, agent: Process, guardian: Process | None = None) -> None:
        super().__init__(ticket)
        self._agent, self._guardian = agent, guardian

    def start(self) -> int:
        """Return a file descriptor that becomes readable when the agent ends; see `Launcher.start`.

        Raises:
            HostError: the agent has ended.
        """
        try:
            return self._agent.open()
        except ProcessLookupError as error:
            raise HostError(f"the agent has ended: {error}") from None

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the agent and its guardian process end; return False if the agent exceeds the
        time limit.
        """
        has_ended = self._agent.wait(timeout_s)
        if has_ended and self._guardian is not None:
            self._guardian.wait(_GUARDIAN_S)  # or something hangs in the kernel
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
        """Record the mesh's new number of ranks; the agent writes it to the ticket's file."""
        self.ticket = msgspec.structs.replace(
            self.ticket, num_ranks=sum(layout), num_resizes=self.ticket.num_resizes + 1
        )

    def describe(self) -> str:
        """Return a text for users on the agent's process."""
        return f"process {self._agent.pid} on this machine"


def command_of(ticket: Ticket) -> list[str]:
    """Return the command line of a mesh's guardian, which forks the agent."""
    return isolated_command("cellmesh.workers.agent.guardian", str(ticket.path))


def spawned(ticket: Ticket, while_it_begins: Callable[[], object]) -> LocalAgent:
    """Start an agent with a new interpreter in a new session, because Jupyter signals the
    kernel's process group.

    Args:
        ticket: ticket of the mesh.
        while_it_begins: called once, before this waits for the interpreter to fork the agent.

    Raises:
        HostError: the agent could not be started; the ticket's directory is removed.
    """
    guardian = None
    try:
        with _agent_log(ticket) as log:
            guardian = subprocess.Popen(
                command_of(ticket),
                env={marks.VARIABLE: marks.free_value(), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        with guardian.stdout:  # type: ignore[union-attr]
            while_it_begins()
            pids = guardian.stdout.readline().split()  # type: ignore[union-attr]
        launcher = LocalAgent(ticket, _living(int(pids[1])), _living(guardian.pid))
        # The mesh may outlive its use by this process: a thread reaps the guardian at its end.
        reaper = threading.Thread(target=guardian.wait, name="cellmesh-reaper", daemon=True)
        reaper.start()
        return launcher
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


def forked(ticket: Ticket, prestart: Prestart) -> LocalAgent:
    """Fork an agent from the waiting zygote, a background process that has imported torch.

    Raises:
        HostError: the agent could not be forked; the ticket's directory is removed.
    """
    try:
        with _agent_log(ticket) as log:
            guardian, agent = map(_living, prestart.start(ticket, log.fileno()))
        return LocalAgent(ticket, agent, guardian)
    except BaseException as error:
        remove_directory(Path(ticket.directory))
        if isinstance(error, OSError):  # no descriptor is free, or the agent has ended at once
            raise HostError(f"cannot fork the agent from a waiting zygote: {error}") from error
        raise


def read_agent_log(ticket: Ticket) -> str:
    """Return the end of the agent's error log; "" if it has no log."""
    return end_of(ticket.logs / "agent.log")


def end_of(path: Path) -> str:
    """Return the last 2,000 characters of a log file; "" without such a file."""
    try:
        return path.read_text(errors="replace")[-2000:].strip()
    except OSError:
        return ""


def describe_full_disk(ticket: Ticket) -> str:
    """Return an error text if the disk of a mesh's directory is full, so that an agent cannot even
    log why it has ended; "" if it is not full.
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
