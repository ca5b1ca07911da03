"""The agent's connection to its zygote: starts it, and asks it to fork ranks and the store."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...wire import marks
from ...wire.environment import Surroundings
from ...wire.interpreter import isolated_command
from ...wire.ticket import Ticket
from .. import linux_process
from ..zygote import (
    MAX_RANKS_A_MESSAGE,
    ONE_THREAD,
    ChangeSurroundings,
    Forked,
    ForkRanks,
    ForkStore,
    ImportFrom,
    Reply,
    serve_agent,
)

if TYPE_CHECKING:
    from ..rank.shell import RankShell

# Forks take milliseconds; a zygote that needs longer than this hangs.
_FORK_S = 20.0
_MAX_MESSAGE_BYTES = 1 << 20


class ZygoteClient:
    """The zygote's process, as the agent has started it, and the socketpair to it.

    A process with one thread that has everything imported, the ranks' shell too, forks the zygote;
    any other starts it.
    """

    def __init__(self, ticket: Ticket, shell: RankShell | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        log = os.open(ticket.logs / "zygote.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if shell is None:
            self.pid = _spawn(ticket, theirs.fileno(), log)
        elif (pid := os.fork()) == 0:
            ours.close()
            linux_process.run_and_exit(
                functools.partial(_become_zygote, ticket, theirs.detach(), log, shell)
            )
        else:
            self.pid = pid
        os.close(log)
        theirs.close()
        self._socket = ours
        self.problem = ""  # why it could not fork all that it was asked for last

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the zygote has sent a message."""
        return self._socket.fileno()

    def receive(self) -> Reply | None:
        """Receive a message that the zygote has sent unasked; None when the zygote has ended."""
        try:
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except OSError:  # it went without reading what was sent to it
            return None
        return msgspec.msgpack.decode(data, type=Reply) if data else None

    def import_from(self, path: Sequence[str]) -> None:
        """Have ranks import from a `sys.path`, for which the zygote waits."""
        with contextlib.suppress(OSError):  # it has ended; its pidfd reports that
            self._socket.send(msgspec.msgpack.encode(ImportFrom(list(path))))

    def change_surroundings(self, changes: Surroundings) -> None:
        """Have ranks that are forked from now on another environment or working directory."""
        # A message for each variable: all of them may be more than one message can carry.
        parts = [Surroundings({name: value}) for name, value in changes.environment.items()]
        if changes.cwd:
            parts.append(Surroundings(cwd=changes.cwd))
        with contextlib.suppress(OSError):  # it has ended; its pidfd reports that
            for part in parts:
                self._socket.send(msgspec.msgpack.encode(ChangeSurroundings(part)))

    def fork_store(self, address: str, port: int, listener: int) -> list[int]:
        """Have the zygote fork the c10d store with its listening socket; return its pid, if any."""
        return self._ask(ForkStore(address, port, os.getpid()), [listener])

    def fork_ranks(
        self, options: Sequence[dict[str, Any]], ends: Sequence[Sequence[int]]
    ) -> list[int]:
        """Have the zygote fork ranks with these options and descriptors; return their pids."""
        pids: list[int] = []
        for start in range(0, len(options), MAX_RANKS_A_MESSAGE):
            part = slice(start, start + MAX_RANKS_A_MESSAGE)
            raw = [msgspec.Raw(msgspec.msgpack.encode(each)) for each in options[part]]
            pids += self._ask(ForkRanks(raw), [number for own in ends[part] for number in own])
        return pids

    def close(self) -> None:
        """Close the socketpair, upon which the zygote exits."""
        self._socket.close()

    def _ask(self, message: Any, descriptors: Sequence[int]) -> list[int]:
        """Ask the zygote for forks and wait for its answer; the agent can do nothing without it."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], list(descriptors))
            self._socket.settimeout(_FORK_S)
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except TimeoutError:
            linux_process.kill([self.pid])  # its end is noticed and reported
            return []
        except OSError:  # it has ended; its pidfd reports that
            return []
        finally:
            self._socket.settimeout(None)
        forked = msgspec.msgpack.decode(data, type=Forked) if data else Forked([])
        self.problem = forked.problem
        return forked.pids


def _spawn(ticket: Ticket, connection: int, log: int) -> int:
    return os.posix_spawn(
        sys.executable,
        isolated_command("cellmesh.workers.zygote", str(connection), str(ticket.path)),
        {**os.environ, **ticket.env, **ONE_THREAD, marks.VARIABLE: marks.value_of(ticket.mark, 0)},
        file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
    )


def _become_zygote(ticket: Ticket, connection: int, log: int, shell: RankShell) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update({**ticket.env, **ONE_THREAD})
    marks.claim(ticket.mark, 0)
    serve_agent(connection, str(ticket.path), shell)
