"""Start an agent on this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ....errors import HostError
from ....wire.interpreter import isolated_command
from ....wire.ticket import (
    Ticket,
    make_directory,
    new_key,
    remove_directory,
    runtime_root,
    write_ticket,
)
from ...options import Options
from .prestart import Prestart


def make_ticket(options: Options, is_lease_chosen: bool) -> Ticket:
    """Make a mesh's directory and ticket.

    Args:
        options: what to start.
        is_lease_chosen: whether the lease is the user's wish, and not the default.

    Returns:
        The ticket, written.

    Raises:
        HostError: the runtime directory cannot be used.
    """
    name = options.name or f"mesh-{os.getpid()}-{secrets.token_hex(2)}"
    directory = make_directory(runtime_root(), name)
    ticket = Ticket(
        name=name,
        key=new_key(),
        directory=str(directory),
        num_ranks=options.num_ranks,
        backend=options.backend,
        mesh_dim_names=tuple(options.mesh),
        mesh_shape=tuple(options.mesh.values()),
        preload=options.preload,
        sys_path=tuple(path for path in sys.path if isinstance(path, str)),
        cwd=os.getcwd(),
        controller_pid=os.getpid(),
        created_at=time.time(),
        lease_s=options.lease_s,
        is_lease_chosen=is_lease_chosen,
        settle_s=options.settle_s,
        on_error=options.on_error,
        auto_heal=options.auto_heal,
    )
    try:
        write_ticket(ticket)
    except HostError:
        remove_directory(directory)
        raise
    return ticket


# How long a guardian may take to end the processes that its agent has left.
_GUARDIAN_S = 5.0


class AgentProcess:
    """An agent's process, which need not be a child of ours.

    Args:
        pid: its number.
        child: its guardian, if we have started that; ends after it. One that is no child of ours is
            watched.

    Raises:
        ProcessLookupError: it has ended.
    """

    def __init__(
        self, pid: int, child: subprocess.Popen[bytes] | AgentProcess | None = None
    ) -> None:
        self.pid = pid
        self._child = child
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the process's end; False if it has not ended in time. After `leave`, True at
        once.
        """
        with self._lock:  # another thread may leave while this one waits
            if self._pidfd < 0:
                return True
            pidfd = os.dup(self._pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            ended = bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
        finally:
            os.close(pidfd)
        if ended and self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # something hangs in the kernel
                self._child.wait(_GUARDIAN_S)
        return ended

    def kill(self) -> None:
        """SIGKILL it."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def leave(self) -> None:
        """Have no more to do with it; a child that is still there is reaped when it ends."""
        with self._lock:
            if self._pidfd < 0:
                return
            os.close(self._pidfd)
            self._pidfd = -1
        if isinstance(self._child, AgentProcess):
            self._child.leave()
        elif self._child is not None and self._child.poll() is None:
            threading.Thread(target=self._child.wait, name="cellmesh-reaper", daemon=True).start()


def start_agent(ticket: Ticket) -> AgentProcess:
    """Start the agent of a ticket, in a session of its own: Jupyter signals the kernel's process
    group.

    Args:
        ticket: what it is to start.

    Returns:
        Its process.

    Raises:
        HostError: it could not be started.
    """
    code = "from cellmesh.workers.agent.guardian import main; sys.exit(main(sys.argv[1]))"
    guardian = None
    try:
        with open(
            ticket.logs / "agent.log", "ab", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as log:
            guardian = subprocess.Popen(
                isolated_command(code, str(ticket.path)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        with guardian.stdout:  # type: ignore[union-attr]
            return AgentProcess(int(guardian.stdout.readline().split()[1]), guardian)  # type: ignore[union-attr]
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


def fork_agent(ticket: Ticket, prestart: Prestart) -> AgentProcess | None:
    """Start the agent of a ticket from the zygote that waits in the background.

    Args:
        ticket: what it is to start.
        prestart: has such a zygote.

    Returns:
        Its process; None if that failed, when the ticket's directory is removed.
    """
    try:
        with open(
            ticket.logs / "agent.log", "ab", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as log:
            pids = prestart.start(ticket, log.fileno())
        if pids is not None:
            return AgentProcess(pids[1], AgentProcess(pids[0]))
    except OSError:  # no descriptor is free, or the agent has ended at once
        pass
    except BaseException:
        remove_directory(Path(ticket.directory))
        raise
    remove_directory(Path(ticket.directory))
    return None


def read_agent_log(ticket: Ticket) -> str:
    """The end of what an agent has complained of; "" if there is nothing."""
    try:
        return (ticket.logs / "agent.log").read_text(errors="replace")[-2000:].strip()
    except OSError:
        return ""
