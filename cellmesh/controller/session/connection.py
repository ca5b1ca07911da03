"""The controller's connection to an agent: greets, numbers messages, and repeats those that a
broken connection lost.

Used on one thread, and made there: a ZeroMQ context of its own goes with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from ...wire import transport
from ...wire.attach import Detached, Hello, Refused, Welcome
from ...wire.codec import Frame, Parcel, at_controller, encode
from ...wire.host import own_package, own_python, own_torch, own_version
from ...wire.messages import PROTOCOL
from ...wire.reliable import Reliable
from ...wire.segments import SegmentFrame
from ..values.pool import open_value

_LINGER_MS = 200
# So many messages are heard before other things are seen to.
_MAX_MESSAGES = 1000
Message = Sequence[Parcel[Any]]


class Connection:
    """The controller's end of the ZeroMQ connection to one agent.

    Args:
        endpoint: the agent's.
        key: the mesh's secret.
        steal: whether to take the mesh from a controller that holds it.
        keys: of an endpoint on TCP: CURVE's own secret key, and the agent's public key.

    Attributes:
        lost_at: since when there is no connection, on the clock of `hear`; None while there is one.
    """

    def __init__(
        self, endpoint: str, key: bytes, steal: bool, keys: tuple[str, str] | None = None
    ) -> None:
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
        self._endpoint = endpoint
        self._context: zmq.Context[transport.Socket] = zmq.Context()
        # A routing id must not begin with a zero.
        self._socket, self._monitor = transport.connect_dealer(
            self._context, endpoint, b"C" + link, keys
        )
        self._codec = at_controller()
        self._reliable: Reliable[Message] = Reliable()
        self._is_open = False  # the agent has greeted us on this connection
        self._numbers = int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))
        self._may_have_news = [True, True]  # messages, and news of the connection
        self._was_welcomed = False
        self.lost_at: float | None = None

    def descriptors(self) -> tuple[int, int]:
        """Return the descriptors to poll before `hear`, once nothing is readable: of messages, and
        of changes of the connection.
        """
        return self._numbers

    def note_ready(self, number: int) -> None:
        """Note that poll has reported one of `descriptors`."""
        self._may_have_news[number == self._numbers[1]] = True

    def has_news(self) -> bool:
        """Return whether `hear` may have something to read: a message, or a connection event."""
        return True in self._may_have_news

    def is_readable(self) -> bool:
        """Return whether a message has arrived; call it after each send, which can hide an arrival
        from poll.
        """
        if self._may_have_news[0]:
            self._may_have_news[0] = transport.readable(self._socket)
        return self._may_have_news[0]

    def send(self, parcels: Message) -> None:
        """Send the agent a message, now or once there is a connection."""
        frames = encode(parcels)
        preamble = self._reliable.wrap(parcels, sum(map(len, frames)))
        if self._is_open:
            self._send([preamble, *frames])

    def hear(self, now: float) -> Iterator[Parcel[Any]]:
        """Yield the agent's messages that have arrived, without waiting.

        Raises:
            ProtocolError: it cannot be understood.
        """
        if self._may_have_news[1]:
            self._may_have_news[1] = False
            self._hear_connection(now)
        for _ in range(_MAX_MESSAGES):
            if not self.is_readable():
                return
            frames = transport.receive(self._socket)
            preamble, rest = bytes(frames[0]), frames[1:]
            if self._reliable.unwrap(preamble, sum(map(len, rest)), now):
                for parcel in self._codec.decode(rest):
                    yield self._open_value(parcel, now) if parcel.buffers else parcel
            elif rest and Reliable.is_aside(preamble):
                yield from self._hear_aside(rest)

    def _open_value(self, parcel: Parcel[Any], now: float) -> Parcel[Any]:
        opened = open_value(parcel)
        for frame in opened.buffers:
            self._reliable.add_bytes(
                frame.num_bytes if type(frame) is SegmentFrame else len(frame), now
            )
        return opened

    def _hear_connection(self, now: float) -> None:
        for is_new in transport.hear_connection(self._monitor):
            self._is_open = False
            self.lost_at = None if is_new else (self.lost_at or now)
            if is_new:
                hello = msgspec.structs.replace(
                    self._hello, num_received=self._reliable.num_received
                )
                self._send_aside([Parcel(hello)])

    def _send(self, frames: list[Frame]) -> None:
        transport.send(self._socket, frames)
        self._may_have_news[0] = True

    def tick(self, now: float) -> None:
        """Acknowledge received messages, if no message that could do so was sent since."""
        ack_at = self._reliable.ack_at
        if self._is_open and ack_at is not None and now >= ack_at:
            self._send_aside([])

    def deadline(self) -> float | None:
        """Return when to call `tick` at the latest."""
        return self._reliable.ack_at if self._is_open else None

    def close(self) -> None:
        """Close the sockets; for a moment, the last messages may still be sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def renew(self) -> None:
        """Greet the agent as a new controller would, as it may have given this controller up."""
        self._hello = msgspec.structs.replace(self._hello, link=os.urandom(16), steal=True)
        self._reliable = Reliable()
        self._is_open = self._was_welcomed = False

    def move(self, endpoint: str, server_key: str) -> None:
        """Connect to another agent in place of the present one."""
        self.renew()
        self._socket.disconnect(self._endpoint)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        self._endpoint, self.lost_at = endpoint, None
        self._socket.connect(endpoint)

    def _hear_aside(self, frames: Sequence[Frame]) -> Iterator[Parcel[Any]]:
        for parcel in self._codec.decode(frames):
            verb = parcel.verb
            if isinstance(verb, Welcome):
                self._is_open = True
                for preamble, message in self._reliable.resume(verb.num_received):
                    self._send([preamble, *encode(message)])
                if self._was_welcomed:  # its state goes on
                    continue
                self._was_welcomed = True
            elif isinstance(verb, Refused) and self._was_welcomed:
                yield Parcel(Detached(verb.reason))
                continue
            yield parcel

    def _send_aside(self, parcels: Message) -> None:
        frames = encode(parcels) if parcels else []
        self._send([self._reliable.wrap_aside(), *frames])
