"""Connections between ranks, for calls of each other's actors."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import CellmeshError, HostError, RankDied
from ...wire.codec import Frame, Parcel, encode
from ...wire.handles import CHALLENGE_BYTES, Address, mark_of, prove, refuse, socket_of
from ...wire.messages import Pickled
from ...wire.stream import QueuedChannel, StreamReader
from ...wire.ticket import read_ticket
from ...wire.waiting import is_own_peer

# A peer answers a challenge, and accepts a connection, at once, unless its interpreter is busy.
GREET_S = 10.0
# How long a thread waits for a rank that reads nothing, before it leaves the rest to another one.
_PATIENCE_MS = 100


class Future(concurrent.futures.Future[Parcel[Any]]):
    """The answer to a call, to come."""

    def done(self) -> bool:
        """Return whether it has come, without the lock, which an interrupt could leave locked."""
        return self._state not in ("PENDING", "RUNNING")


class Connection:
    """A socket to another rank.

    Args:
        connection: the socket.
        peer: the rank, in words, for errors.
        rank: its number.

    Attributes:
        pending: calls that the other rank has not answered, with their titles.
        challenge: the challenge that the other rank has not answered yet; b"" for none.
        known: the actors that the other rank is known to have.
        on_full: called if messages begin to wait until the socket is writable, and as none is left.
    """

    def __init__(self, connection: socket.socket, peer: str = "", rank: int = -1) -> None:
        self.socket, self.peer, self.rank = connection, peer, rank
        self.reader, self.challenge, self.proof = StreamReader(), b"", b""
        self.pending: dict[int, tuple[Future, str]] = {}
        self.known: set[str] = set()
        self.is_open = True
        self.on_full: Callable[[bool], None] = lambda is_full: None
        self._is_full = False
        self._channel, self._lock = QueuedChannel(connection), threading.Lock()
        self._outbox = collections.deque[list[Frame]]()

    @property
    def number(self) -> int:
        """Descriptor of its socket."""
        return self.socket.fileno()

    def lend(self, pickled: Pickled, buffers: list[Frame]) -> tuple[Pickled, list[Frame]]:
        """Return a call's arguments as this and all connections to that mesh send them."""
        return pickled, buffers

    def send(self, *parcels: Parcel[Any]) -> None:
        """Send messages, on any thread, after those that wait; without any, send these.

        Messages wait while another thread sends, which then sends them as well, or while the other
        rank reads nothing (it is stopped, or busy in C++), until `send` is called again.
        """
        if parcels:
            self._outbox.append(encode(parcels))
        is_due = not parcels
        while (self._outbox or is_due) and self._lock.acquire(blocking=False):
            is_due = False
            try:
                self._push()
            except BaseException:  # an interrupt: a part of the message may have been sent
                self.close()
                raise
            finally:
                self._lock.release()

    def _push(self) -> None:
        is_sent, was_full = self._channel.flush(), self._is_full
        while self._outbox:
            is_sent = self._channel.send(self._outbox.popleft())
        if not (is_sent or was_full):
            writable = select.poll()
            writable.register(self.socket, select.POLLOUT)
            while not is_sent and writable.poll(_PATIENCE_MS):
                is_sent = self._channel.flush()
        if not is_sent:
            self._channel.keep()
        self._is_full = not is_sent
        if self._is_full != was_full:
            self.on_full(self._is_full)

    def close(self) -> None:
        """End the connection; the thread that reads it gets its end."""
        self.is_open = False
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def dial(address: Address, rank: int) -> Connection | None:
    """Connect to a rank, and prove that this process may read its mesh's ticket; return None if its
    mesh is not on this host alone. Blocks.

    Raises:
        MeshUsageError: another user is there.
        RankDied: the rank does not listen.
        HostError: the rank does not answer.
    """
    try:
        ticket = read_ticket(Path(address.directory) / "ticket.json")
        is_whole = ticket.host is None and not ticket.spans_hosts  # else ranks do not listen
        is_there = is_whole and mark_of(ticket.key) == address.mark
    except CellmeshError:
        is_there = False
    if not is_there:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(GREET_S)
        connection.connect(socket_of(address.directory, rank))
        if not is_own_peer(connection):
            raise refuse(address, "is at a socket of another user")
        challenge = connection.recv(CHALLENGE_BYTES)
        if len(challenge) < CHALLENGE_BYTES:
            raise ConnectionError("it has ended")
        connection.sendall(prove(ticket.key, challenge))
    except (TimeoutError, BlockingIOError):  # the latter of a long queue
        connection.close()
        raise refuse_silent(address, rank) from None
    except OSError as error:
        connection.close()
        raise RankDied(
            rank,
            f"of {address.mesh} is dead, or was replaced and has no `{address.actor}` "
            f"({error.strerror or error})",
        ) from None
    except BaseException:
        connection.close()
        raise
    return Connection(connection, f"{address.mesh} {rank}", rank)


def refuse_silent(address: Address, rank: int) -> HostError:
    """Return the error for a rank that listens, but does not answer."""
    return HostError(
        f"rank {rank} of {address.mesh} has not answered for {GREET_S:.0f} s: its process is "
        "stopped (SIGSTOP, a debugger), or in C++ code that holds Python's lock. %dist_stacks of "
        f"{address.mesh} shows where; it may be called again"
    )
