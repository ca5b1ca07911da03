"""The connection to an agent: greets, numbers what is said, and says it again when the connection was cut.

Used on one thread, and made there: a ZeroMQ context of its own goes with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from ..wire import transport
from ..wire.framing import Frame, Parcel, at_controller, encode
from ..wire.messages import PROTOCOL, Detached, Hello, Refused, Welcome
from ..wire.place import own_package, own_python, own_torch, own_version
from ..wire.reliable import Reliable

_LINGER_MS = 200
Message = Sequence[Parcel[Any]]


class Connection:
    """A controller's end.

    Args:
        endpoint: the agent's.
        key: the mesh's secret.
        steal: whether to take the mesh from a controller that holds it.
    """

    def __init__(self, endpoint: str, key: bytes, steal: bool) -> None:
        link = os.urandom(16)
        self._hello = Hello(
            key,
            PROTOCOL,
            os.getpid(),
            own_version(),
            own_python(),
            link=link,
            steal=steal,
            package=own_package(),
            torch=own_torch(),
        )
        self._context: zmq.Context[transport.Socket] = zmq.Context()
        # A routing id must not begin with a zero.
        self._socket, self._monitor = transport.connect_dealer(self._context, endpoint, b"C" + link)
        self._codec = at_controller()
        self._reliable: Reliable[Message] = Reliable()
        self._is_open = False  # the agent has greeted us on this connection
        self._was_welcomed = False

    def sockets(self) -> tuple[transport.Socket, transport.Socket]:
        """What to wait for before `hear`: messages, and news of the connection."""
        return self._socket, self._monitor

    def send(self, parcels: Message) -> None:
        """Say something, now or when there is a connection."""
        frames = encode(parcels)
        preamble = self._reliable.wrap(parcels, sum(map(len, frames)))
        if self._is_open:
            transport.send(self._socket, [preamble, *frames])

    def hear(self, now: float) -> Iterator[Parcel[Any]]:
        """What has arrived, without waiting.

        Raises:
            ProtocolError: it cannot be understood.
        """
        for is_new in transport.hear_connection(self._monitor):
            self._is_open = False
            if is_new:
                hello = msgspec.structs.replace(self._hello, num_received=self._reliable.num_received)
                self._send_aside([Parcel(hello)])
        for frames in transport.drain(self._socket):
            preamble, rest = bytes(frames[0]), frames[1:]
            if self._reliable.unwrap(preamble, sum(map(len, rest)), now):
                yield from self._codec.decode(rest)
            elif rest and Reliable.is_aside(preamble):
                yield from self._hear_aside(rest)

    def tick(self, now: float) -> None:
        """Acknowledge what has been heard, where nothing was said since."""
        if self._is_open and self._reliable.owes_ack(now):
            self._send_aside([])

    def deadline(self) -> float | None:
        """When to call `tick` at the latest."""
        return self._reliable.deadline() if self._is_open else None

    def close(self) -> None:
        """Close the sockets; what was said last may take a moment to go out."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def _hear_aside(self, frames: Sequence[Frame]) -> Iterator[Parcel[Any]]:
        for parcel in self._codec.decode(frames):
            verb = parcel.verb
            if isinstance(verb, Welcome):
                self._is_open = True
                for preamble, message in self._reliable.resume(verb.num_received):
                    transport.send(self._socket, [preamble, *encode(message)])
                if self._was_welcomed:  # its state goes on
                    continue
                self._was_welcomed = True
            elif isinstance(verb, Refused) and self._was_welcomed:
                yield Parcel(Detached(verb.reason))
                continue
            yield parcel

    def _send_aside(self, parcels: Message) -> None:
        frames = encode(parcels) if parcels else []
        transport.send(self._socket, [self._reliable.wrap_aside(), *frames])
