"""The agent's connection to its zygote: starts it, and asks it to fork ranks and the store."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ...wire import marks
from ...wire.environment import Surroundings
from ...wire.process import isolated_command
from ...wire.ticket import Ticket
from .. import linux_process
from ..zygote import (
    MAX_RANKS_A_MESSAGE,
    ONE_THREAD,
    ChangeSurroundings,
    Fork,
    Forked,
    Imported,
    ImportFrom,
    Reply,
    StoreOptions,
    serve_agent,
)

# A fork takes milliseconds; a zygote that needs longer than this is taken to hang.
_FORK_S = 20.0
_MAX_MESSAGE_BYTES = 1 << 20


class ZygoteClient:
    """The zygote's process, a child of the agent, and the socketpair that connects them.

    Args:
        ticket: ticket of the mesh.
        imported: the ranks' shell and modules, if this process has imported torch.
        may_fork: whether to fork the zygote where that is enough, as this process has one thread
            and nothing that a rank must not inherit; otherwise it is a new process.
    """

    def __init__(
        self, ticket: Ticket, imported: Imported | None = None, may_fork: bool = False
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        log = os.open(ticket.logs / "zygote.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # Variables of ranks may take effect only when an interpreter or libc begins.
        if imported is None and (ticket.env or not may_fork):
            self.pid = _spawn(ticket, theirs.fileno(), log)
        elif (pid := os.fork()) == 0:
            ours.close()
            linux_process.run_and_exit(
                functools.partial(_become_zygote, ticket, theirs.detach(), log, imported)
            )
        else:
            self.pid = pid
        os.close(log)
        theirs.close()
        self._socket = ours
        self.problem = ""  # why the last request was not carried out in full
        self.preloaded = ""  # sentence for users on modules that the zygote has imported

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the zygote has sent a message."""
        return self._socket.fileno()

    def receive(self) -> Reply | None:
        """Receive a message that the zygote has sent of its own accord; None when the zygote has
        ended.
        """
        try:
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except OSError:  # it ended without reading all messages
            return None
        return msgspec.msgpack.decode(data, type=Reply) if data else None

    def import_from(self, path: Sequence[str]) -> None:
        """Send the zygote the `sys.path` of the ranks, without which it does not get ready."""
        with contextlib.suppress(OSError):  # if it has ended, its pidfd reports that
            self._socket.send(msgspec.msgpack.encode(ImportFrom(list(path))))

    def change_surroundings(self, changes: Surroundings) -> None:
        """Change the environment variables or the working directory with which the zygote forks
        ranks from now on.
        """
        # One message per variable, as all variables may exceed the size of a message.
        parts = [Surroundings({name: value}) for name, value in changes.environment.items()]
        if changes.cwd:
            parts.append(Surroundings(cwd=changes.cwd))
        with contextlib.suppress(OSError):  # if it has ended, its pidfd reports that
            for part in parts:
                self._socket.send(msgspec.msgpack.encode(ChangeSurroundings(part)))

    def fork(
        self,
        store: socket.socket | None,
        options: Sequence[dict[str, Any]] = (),
        ends: Sequence[Sequence[int]] = (),
    ) -> list[int]:
        """Ask the zygote to fork a c10d store that listens on this socket, if there is one, and
        ranks with these options and descriptors. Return the pids, the store's first: 0 for a
        process that could not be forked, and fewer if the zygote ends.
        """
        pids: list[int] = []
        for start in range(0, max(1, len(options)), MAX_RANKS_A_MESSAGE):
            part = slice(start, start + MAX_RANKS_A_MESSAGE)
            raw = [msgspec.Raw(msgspec.msgpack.encode(each)) for each in options[part]]
            numbers = [number for own in ends[part] for number in own]
            request = Fork(None, raw)
            if store is not None and not start:
                address, port = store.getsockname()[:2]
                request = Fork(StoreOptions(address, port, os.getpid()), raw)
                numbers.insert(0, store.fileno())
            forked = self._ask(request, numbers)
            pids += forked
            if len(forked) < len(raw) or self.problem:
                break
        return pids

    def close(self) -> None:
        """Close the socketpair, which makes the zygote exit."""
        self._socket.close()

    def _ask(self, message: Any, descriptors: Sequence[int]) -> list[int]:
        """Send the zygote a request to fork processes, and wait for their pids; kill a zygote that
        does not answer in time.
        """
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], list(descriptors))
            self._socket.settimeout(_FORK_S)
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except TimeoutError:
            linux_process.kill([self.pid])  # its pidfd reports the end
            return []
        except OSError:  # if it has ended, its pidfd reports that
            return []
        finally:
            self._socket.settimeout(None)
        forked = msgspec.msgpack.decode(data, type=Forked) if data else Forked([])
        self.problem, self.preloaded = forked.problem, forked.preloaded or self.preloaded
        return forked.pids


def _spawn(ticket: Ticket, connection: int, log: int) -> int:
    return os.posix_spawn(
        sys.executable,
        isolated_command("cellmesh.workers.zygote", str(connection), str(ticket.path)),
        {**os.environ, **ticket.env, **ONE_THREAD, marks.VARIABLE: marks.value_of(ticket.mark, 0)},
        file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
    )


def _become_zygote(ticket: Ticket, connection: int, log: int, imported: Imported | None) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update({**ticket.env, **ONE_THREAD})
    marks.claim(ticket.mark, 0)
    serve_agent(connection, str(ticket.path), imported)
