"""Connections between ranks of one host, for calls of each other's actors."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

from ...errors import CellmeshError, RankDied
from ...wire.codec import Frame, Parcel, encode
from ...wire.handles import CHALLENGE_BYTES, Address, mark_of, prove, refuse, socket_of
from ...wire.stream import Channel, StreamReader
from ...wire.ticket import read_ticket
from ...wire.waiting import is_own_peer

# A peer answers a challenge, and accepts a connection, at once, unless its interpreter is busy.
_GREET_S = 10.0
Future = concurrent.futures.Future[Parcel[Any]]


class Connection:
    """A socket to another rank.

    Args:
        connection: the socket.
        peer: the rank, in words, for errors.
        rank: its number.

    Attributes:
        pending: calls that the other rank has not answered, with their titles.
        challenge: the challenge that the other rank has not answered yet; b"" for none.
    """

    def __init__(self, connection: socket.socket, peer: str = "", rank: int = -1) -> None:
        self.socket, self.peer, self.rank = connection, peer, rank
        self.reader, self.challenge, self.proof = StreamReader(), b"", b""
        self.pending: dict[int, tuple[Future, str]] = {}
        self.is_open = True
        self._channel, self._lock = Channel(connection), threading.Lock()
        self._outbox = collections.deque[list[Frame]]()

    def send(self, *parcels: Parcel[Any], waits: bool = True) -> None:
        """Send messages, on any thread.

        Args:
            parcels: the messages.
            waits: whether to wait while another thread sends; it sends these as well otherwise.
        """
        self._outbox.append(encode(parcels))
        while self._outbox and self._lock.acquire(blocking=waits):
            try:
                while self._outbox:
                    self._channel.send(self._outbox.popleft())
            except OSError:
                self.close()
            except BaseException:  # an interrupt: a part of the message may have been sent
                self.close()
                raise
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the connection; the thread that reads it gets its end."""
        self.is_open = False
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def dial(address: Address, rank: int) -> Connection:
    """Connect to a rank, and prove that this process may read its mesh's ticket. Blocks.

    Raises:
        MeshUsageError: the mesh has ended, or is on another host.
        RankDied: the rank does not listen.
    """
    try:
        ticket = read_ticket(Path(address.directory) / "ticket.json")
        is_there = mark_of(ticket.key) == address.mark and not ticket.spans_hosts
    except CellmeshError:
        is_there = False
    if not is_there:
        raise refuse(
            address,
            "cannot be called from here: its mesh has ended, or is on another host. Between "
            "hosts, let the notebook call it and pass the values on",
        )
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_GREET_S)
        connection.connect(socket_of(address.directory, rank))
        if not is_own_peer(connection):
            raise refuse(address, "is at a socket of another user")
        challenge = connection.recv(CHALLENGE_BYTES)
        if len(challenge) < CHALLENGE_BYTES:
            raise ConnectionError("it has ended")
        connection.sendall(prove(ticket.key, challenge))
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
