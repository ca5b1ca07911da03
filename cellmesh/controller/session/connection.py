"""The controller's ZeroMQ connection to an agent: authenticates the controller, numbers messages,
and sends messages again that a broken connection has lost.

It is created and used on one thread, like its ZeroMQ context.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from ...errors import HostError
from ...wire import transport
from ...wire.attach import Detached, Hello, Refused, Welcome
from ...wire.bulk import Arrivals, Sender
from ...wire.codec import Frame, Parcel, at_controller, encode
from ...wire.host import host_name, own_package, own_python, own_torch, own_version
from ...wire.messages import PROTOCOL, Died, Done, MeshReady, Ranked, Relay
from ...wire.own_file import Secret, SecretBytes
from ...wire.peer_calls import Routed
from ...wire.reliable import Reliable
from ...wire.segment_pool import SegmentPool
from ...wire.segments import SegmentFrame
from ...wire.status import RankState, StackText
from ...wire.stopping import StopState
from ...wire.values import Chunk, Unwanted
from ..kernel import own_notebook
from ..values.segments import open_value

_LINGER_MS = 200
# Time limits of the first connection to another host, after which the host counts as out of reach,
# and of an agent's answer to the greeting (`Hello`).
_OPEN_S, _ANSWER_S = 3.0, 10.0
# Most messages that are read in one turn of the link's loop.
_MAX_MESSAGES = 1000
# Messages of ranks' control threads, which do not wait for earlier ones of their main threads.
_BESIDE = (RankState, StackText, StopState, Routed)
_WHY_INTERRUPTED = (
    "its run was interrupted while the value was on its way: ask for it again (mesh.pull)"
)
Message = Sequence[Parcel[Any]]


def _new_name() -> bytes:
    return b"C" + os.urandom(16)  # a routing id must not begin with a zero


class Connection:
    """The controller's end of the ZeroMQ connection to one agent.

    Args:
        endpoint: ZeroMQ endpoint of the agent.
        key: the mesh's secret key, hexadecimal.
        steal: whether to take the mesh from a controller that holds it.
        keys: for an endpoint on TCP: this side's secret CURVE key and the agent's public key.
            Segments of shared memory then travel in chunks.
        context: ZeroMQ context, which its owner closes; None to create one.
        pool: makes the segments of values from another host; None to create one.
        visits: as for `attach`.

    Raises:
        HostError: this process cannot open more sockets.

    Attributes:
        is_remote: whether the agent may be on another host.
        lost_at: time in seconds at which the connection to an agent on another host was lost, by
            the clock of `hear`; None while there is one. The end of an agent on this host is
            detected by the link.
    """

    def __init__(
        self,
        endpoint: str,
        key: Secret,
        steal: bool,
        keys: tuple[Secret, str] | None = None,
        context: zmq.Context[transport.Socket] | None = None,
        pool: SegmentPool | None = None,
        visits: bool = False,
    ) -> None:
        link, name = os.urandom(16), _new_name()
        self._hello = Hello(
            bytes.fromhex(key),
            PROTOCOL,
            os.getpid(),
            own_version(),
            own_python(),
            link=link,
            steal=steal,
            package=own_package(),
            torch=own_torch(),
            host=host_name(),
            notebook=own_notebook(),
            visits=visits,
        )
        self._pool = pool or SegmentPool("cellmesh-result")
        self._owns_context = context is None
        self._context = context or transport.make_context(1)
        try:
            self._socket, self._monitor = transport.connect_dealer(
                self._context, endpoint, name, keys
            )
        except HostError:
            if self._owns_context:
                self._context.term()
            raise
        self._codec = at_controller()
        self.is_remote = keys is not None
        self._endpoint, self._is_broken = endpoint, False
        self._begin()
        self._is_open = False  # the agent has answered the greeting on this connection
        # ZeroMQ has no event for a connection that never opens.
        self._open_by = time.monotonic() + _OPEN_S if self.is_remote else None
        self._numbers = int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))
        self._may_have_news = [True, True]  # of messages, and of connection events
        self._was_welcomed = False
        self.lost_at: float | None = None

    def _begin(self) -> None:
        self._sender, self._ready = Sender(), list[Parcel[Any]]()  # had waited for segments
        self._arrivals = Arrivals(_WHY_INTERRUPTED, self._pool)
        self._reliable: Reliable[Message] = Reliable(self._note_acked if self.is_remote else None)

    def descriptors(self) -> tuple[int, int]:
        """Return the file descriptors to poll for the agent's messages and for connection events.

        They report arrivals only while nothing is readable (`is_readable`).
        """
        return self._numbers

    def note_ready(self, number: int) -> None:
        """Record that poll has reported this file descriptor, one of `descriptors`, as readable."""
        self._may_have_news[number == self._numbers[1]] = True

    def has_news(self) -> bool:
        """Return whether `hear` may have something to read: a message, or a connection event."""
        return True in self._may_have_news or bool(self._ready)

    def is_readable(self) -> bool:
        """Return whether a message of the agent can be read; to be called after each send, as poll
        may not report a message that arrives during a send.
        """
        if self._may_have_news[0]:
            self._may_have_news[0] = transport.readable(self._socket)
        return self._may_have_news[0] or bool(self._ready)

    def send(self, parcels: Message) -> None:
        """Send the agent a message, now or once the connection is open."""
        frames = encode(parcels)
        preamble = self._reliable.wrap(parcels, sum(map(len, frames)))
        if self._is_open:
            self._send([preamble, *frames])
        if self.is_remote:
            self._follow(parcels)

    def _follow(self, parcels: Message) -> None:
        """Send the shared-memory segments that sent messages refer to, and stop waiting for
        segments of the runs that these messages interrupt.
        """
        for verb, buffers in parcels:
            if type(verb) is Relay and verb.lends:
                assert isinstance(buffers[-1], SegmentFrame)
                self._sender.add(buffers[-1], verb.ranks)
            elif type(verb) is Relay and verb.channel == "control" and self._arrivals:
                self._ready += self._arrivals.interrupt(buffers)
        self._send_chunks()

    def _send_chunks(self) -> None:
        while (parcel := self._sender.next(time.monotonic())) is not None:
            frames = encode([parcel])
            preamble = self._reliable.wrap([parcel], sum(map(len, frames)))
            if self._is_open:
                self._send([preamble, *frames])

    def _note_acked(self, parcels: Message) -> None:
        self._sender.acked(parcels, time.monotonic())

    def hear(self, now: float) -> Iterator[Parcel[Any]]:
        """Yield the agent's messages that have arrived, without waiting.

        Raises:
            ProtocolError: a message cannot be decoded.
        """
        if self._may_have_news[1]:
            self._may_have_news[1] = False
            self._hear_connection(now)
        if self._ready:
            ready, self._ready = self._ready, []
            yield from (self._open_value(parcel, now) for parcel in ready)
        for _ in range(_MAX_MESSAGES):
            if not self.is_readable():
                if self._is_broken:
                    self._connect_again()
                return
            frames = transport.receive(self._socket)
            preamble, rest = bytes(frames[0]), frames[1:]
            if self._reliable.unwrap(preamble, sum(map(len, rest)), now):
                parcels = self._codec.decode(rest)
                if self.is_remote:
                    for parcel in parcels:
                        yield from self._admit(parcel, now)
                else:  # all are opened before any message that acknowledges them can be sent
                    yield from [self._open_value(p, now) if p.buffers else p for p in parcels]
            elif rest and Reliable.is_aside(preamble):
                yield from self._hear_aside(rest)
            if self.is_remote and self._sender:
                self._send_chunks()

    def _admit(self, parcel: Parcel[Any], now: float) -> Iterator[Parcel[Any]]:
        """Take in a message of an agent on another host; yield each message that is complete, since
        all its shared-memory segments have arrived.
        """
        verb, buffers = parcel
        if type(verb) is Chunk:
            admitted = self._arrivals.take(verb, buffers[0])
            if admitted is None:
                self.send([Parcel(Unwanted(verb.loan))])
            self._acknowledge()  # acknowledged at once: the agent waits for it
        elif type(verb) is Unwanted:
            self._sender.drop(verb.loan)
            return
        elif type(verb) is Ranked and type(verb.verb) not in _BESIDE:
            value = verb.verb.payload if type(verb.verb) is Done else None
            is_mapped = value is not None and value.is_mapped
            run = getattr(verb.verb, "run", -1)
            admitted = self._arrivals.admit(parcel, verb.ranks, run, is_mapped)
        elif type(verb) is Died:
            admitted = self._arrivals.admit(parcel, (verb.rank,))
        elif type(verb) is MeshReady:  # every rank is new
            admitted = [*self._arrivals.abandon("the rank that had it was replaced"), parcel]
        else:
            admitted = [parcel]
        for each in admitted or ():
            yield self._open_value(each, now) if each.buffers else each

    def _open_value(self, parcel: Parcel[Any], now: float) -> Parcel[Any]:
        opened = open_value(parcel)
        for frame in opened.buffers:
            self._reliable.add_bytes(
                frame.num_bytes if type(frame) is SegmentFrame else len(frame), now
            )
        return opened

    def _hear_connection(self, now: float) -> None:
        for is_new in transport.hear_connection(self._monitor):
            if not self._is_broken:
                self._note_connection(is_new, now)

    def _note_connection(self, is_there: bool, now: float) -> None:
        self._is_open, self._open_by = False, None
        if self.is_remote:
            self.lost_at = None if is_there else (self.lost_at or now)
            self._is_broken = not is_there
        if is_there:
            self._open_by = now + _ANSWER_S if self.is_remote else None
            hello = msgspec.structs.replace(self._hello, num_received=self._reliable.num_received)
            frames = map(SecretBytes, encode([Parcel(hello)]))
            self._send([self._reliable.wrap_aside(), *frames])

    def _connect_again(self) -> None:
        """Reconnect under a new ZeroMQ identity, once all messages of the broken connection have
        been read.
        """
        self._is_broken = False
        transport.connect_again(self._socket, self._endpoint, _new_name())
        self._may_have_news = [True, True]

    def _send(self, frames: list[Frame]) -> None:
        transport.send(self._socket, frames)
        self._may_have_news[0] = True

    def tick(self, now: float) -> None:
        """Send an acknowledgement that is due, and count the agent as out of reach if the
        connection has not opened, or the agent has not answered the greeting, in time.
        """
        if self._open_by is not None and now >= self._open_by:
            self._open_by, self.lost_at = None, now
        ack_at = self._reliable.ack_at
        if self._is_open and ack_at is not None and now >= ack_at:
            self._acknowledge()

    def deadline(self) -> float | None:
        """Return the latest time at which `tick` must be called, in seconds; None without a
        deadline.
        """
        return self._reliable.ack_at if self._is_open else self._open_by

    def close(self) -> None:
        """Close the connection's sockets, which may still send the last messages for a moment."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        if self._owns_context:
            self._context.term()

    def renew(self) -> None:
        """Begin a new session with the agent, as a new controller, since the agent may have dropped
        this one.
        """
        self._hello = msgspec.structs.replace(self._hello, link=os.urandom(16), steal=True)
        self._begin()
        self._is_open = self._was_welcomed = False

    def _hear_aside(self, frames: Sequence[Frame]) -> Iterator[Parcel[Any]]:
        for parcel in self._codec.decode(frames):
            verb = parcel.verb
            if isinstance(verb, Welcome | Refused):  # the greeting is answered
                self._open_by = self.lost_at = None
            if isinstance(verb, Welcome):
                self._is_open = True
                for preamble, message in self._reliable.resume(verb.num_received):
                    self._send([preamble, *encode(message)])
                if self._was_welcomed:  # the controller has the mesh's state already
                    continue
                self._was_welcomed = True
            elif isinstance(verb, Refused) and self._was_welcomed:
                yield Parcel(Detached(verb.reason))
                continue
            yield parcel

    def _acknowledge(self) -> None:
        self._send([self._reliable.wrap_aside()])
