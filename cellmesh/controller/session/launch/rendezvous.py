"""The listener in the notebook, to which hosts that people or engines start announce themselves."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from ....errors import HostError
from ....wire import transport
from ....wire.curve import AllowList, KeyPair, public_of
from ....wire.descriptors import wait_readable
from ....wire.handshakes import PeerMonitor
from ....wire.hosts import Announcement
from ....wire.own_file import Secret, SecretBytes
from ....wire.rendezvous import AGAIN_S, ARRIVED, ORDER, REFUSED, SAID, TICKET, HostFacts

# A host that waits and says nothing for so long has gone; one that starts its agent may be slower.
_GONE_S = 5 * AGAIN_S
_STARTING_S = 60.0


@dataclass(eq=False)
class Guest:
    """A host that has announced itself.

    Attributes:
        identity: of its connection.
        facts: what it has said of itself.
        heard_at: when it said something last, in seconds.
        has_part: it was given a ticket.
        said: its announcements that nobody has taken yet.
    """

    identity: bytes
    facts: HostFacts
    heard_at: float
    has_part: bool = False
    said: list[Announcement] = field(default_factory=list)

    def describe(self) -> str:
        """Name the host, its addresses and GPUs."""
        gpus = f", {len(self.facts.gpus)} GPUs" if self.facts.gpus else ""
        return f"{self.facts.name} ({', '.join(self.facts.addresses)}{gpus})"


def choose_guests(guests: Sequence[Guest], now: float) -> list[Guest]:
    """Return the hosts that wait for a part, in the order of their engine's numbers, or of arrival.

    Args:
        guests: in the order of arrival.
        now: seconds.
    """
    waiting = [guest for guest in guests if not guest.has_part and now - guest.heard_at <= _GONE_S]
    return sorted(waiting, key=lambda guest: guest.facts.number)


class Rendezvous:
    """A listener on one address of this host, served by a thread of its own.

    Args:
        endpoint: ``tcp://address:port``, or ``tcp://address:*``.
        secret: CURVE's secret key of the listener.
        allowed: the public key of the hosts that may announce themselves.
        refused: called by the thread, once a second at most, with how many peers were refused.

    Raises:
        HostError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, secret: Secret, allowed: str, refused: Callable[[int], None]
    ) -> None:
        self._context: zmq.Context[transport.Socket] = zmq.Context()
        self._allowed = AllowList(self._context, [allowed])
        try:
            keys = KeyPair(public_of(secret), secret)
            self._socket = transport.bind_router(self._context, endpoint, keys)
        except HostError:
            self._allowed.close()
            self._context.term()
            raise
        self._monitor = PeerMonitor(self._socket)
        self._refused, self._num_refused, self._said_at = refused, 0, -math.inf
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._guests: dict[bytes, Guest] = {}
        self._changed = threading.Condition()  # also guards the sockets
        self._is_closing = False
        self._wake_read, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="cellmesh-rendezvous", daemon=True)
        self._thread.start()

    def gather(
        self,
        num_hosts: int,
        until: float,
        report: Callable[[Sequence[Guest]], None],
        at_least: int | None = None,
    ) -> list[Guest]:
        """Wait until hosts wait for a part; return as many in their order.

        Args:
            num_hosts: how many.
            until: when to give up, on the monotonic clock; infinite to wait for as long as it
                takes.
            report: called with those that wait, at first and when they change.
            at_least: how many will do when the time is over; None for all.

        Raises:
            HostError: they have not announced themselves in time.
        """
        reported: list[Guest] | None = None
        while True:
            with self._changed:
                now = time.monotonic()
                waiting = choose_guests(list(self._guests.values()), now)
            if waiting != reported:
                report(waiting)
                reported = waiting
            if len(waiting) >= num_hosts:
                return waiting[:num_hosts]
            if now >= until:
                if at_least is not None and len(waiting) >= at_least:
                    return waiting
                names = ", ".join(guest.facts.name for guest in waiting) or "none"
                raise HostError(f"{num_hosts} hosts are awaited, and {names} announced itself")
            with self._changed:
                self._changed.wait(min(AGAIN_S, until - now))

    def give(self, guest: Guest, ticket: SecretBytes) -> None:
        """Give a host its agent's ticket."""
        guest.has_part = True
        self._say(guest, TICKET, ticket)

    def order(self, guest: Guest, line: bytes) -> None:
        """Send a host an order."""
        self._say(guest, ORDER, line)

    def refuse(self, guest: Guest, reason: str) -> None:
        """Send a host away; the process that announced it ends with this text."""
        self._say(guest, REFUSED, reason.encode())
        with self._changed:
            self._guests.pop(guest.identity, None)

    def hear(self, guest: Guest, until: float) -> Announcement:
        """Wait for what a host announces.

        Raises:
            HostError: it announces nothing in time, or has gone.
        """
        name = guest.facts.name
        with self._changed:
            while not guest.said:
                now = time.monotonic()
                if now - guest.heard_at > _STARTING_S or guest.identity not in self._guests:
                    raise HostError(f"{name} is not heard any longer: what started its agent ended")
                if now >= until:
                    raise HostError(f"{name} has not started its agent in time")
                self._changed.wait(min(AGAIN_S, until - now))
            return guest.said.pop(0)

    def close(self, reason: str) -> None:
        """Send away who waits, and close the socket."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            waiting = [guest for guest in self._guests.values() if not guest.has_part]
        for guest in waiting:
            self._say(guest, REFUSED, reason.encode())
        os.write(self._wake, b"x")
        self._thread.join()
        self._allowed.close()
        self._monitor.close()
        self._socket.close(linger=500)
        self._context.term()
        os.close(self._wake)
        os.close(self._wake_read)

    # ---- the sockets, by any thread that holds `_changed`

    def _run(self) -> None:
        numbers = [self._allowed.fileno(), self._monitor.fileno(), self._wake_read]
        numbers.append(int(self._socket.getsockopt(zmq.FD)))
        while not self._is_closing:
            # ZeroMQ's descriptors report changes only, and a send of another thread may take one.
            wait_readable(numbers, AGAIN_S)
            with self._changed:
                self._serve()
            self._count()

    def _count(self) -> None:
        self._monitor.hear()
        number, now = self._monitor.num_refused, time.monotonic()
        if number != self._num_refused and now - self._said_at >= AGAIN_S:
            self._num_refused, self._said_at = number, now
            self._refused(number)

    def _say(self, guest: Guest, word: bytes, text: bytes) -> None:
        with self._changed:
            transport.send(self._socket, [guest.identity, word, text])
            self._serve()

    def _serve(self) -> None:
        self._allowed.serve()
        while transport.readable(self._socket):
            frames = [bytes(frame) for frame in transport.receive(self._socket)]
            if len(frames) == 3:
                with contextlib.suppress(msgspec.MsgspecError):  # of another version
                    self._take(*frames)
        self._changed.notify_all()

    def _take(self, identity: bytes, word: bytes, text: bytes) -> None:
        guest = self._guests.get(identity)
        now = time.monotonic()
        if word == ARRIVED:
            facts = msgspec.json.decode(text, type=HostFacts)
            if guest is not None:
                guest.heard_at = now
                return
            for other in list(self._guests.values()):
                if other.facts.place == facts.place:  # it was started once more there
                    reason = f"process {facts.pid} has announced {facts.name} once more"
                    frames = [other.identity, REFUSED, reason.encode()]
                    transport.send(self._socket, list(frames))
                    del self._guests[other.identity]
            self._guests[identity] = Guest(identity, facts, now)
        elif word == SAID and guest is not None:
            guest.said.append(msgspec.json.decode(text, type=Announcement))
            guest.heard_at = now
