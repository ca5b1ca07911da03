"""Counts the peers that a bound TCP socket has refused, from the events of ZeroMQ's monitor.

ZeroMQ says by its descriptor which connection was accepted and which has ended, but not which one
has passed the handshake, and says nothing of a peer that does not speak its protocol at all. So a
connection that ends counts as refused unless it is one of those that have passed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import zmq

# What a monitor that `PeerMonitor` reads has to watch.
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass
class Handshakes:
    """The connections of one socket. Pure.

    Attributes:
        num_refused: how many have ended without a handshake.
    """

    num_refused: int = 0
    _pending: set[int] = field(default_factory=set)  # accepted; some of them may have passed
    _open: set[int] = field(default_factory=set)  # passed
    _num_passed: int = 0  # of the pending ones

    def accepted(self, descriptor: int) -> None:
        """Note a new connection."""
        self._pending.add(descriptor)

    def passed(self) -> None:
        """Note that one of the connections has passed the handshake."""
        self._num_passed += 1
        self._settle()

    def ended(self, descriptor: int) -> None:
        """Note the end of a connection."""
        if descriptor in self._open:
            self._open.discard(descriptor)
        else:
            self._pending.discard(descriptor)
            self.num_refused += 1
            self._settle()

    def _settle(self) -> None:
        if self._num_passed > len(self._pending):  # one that has ended, and was counted, had passed
            self._num_passed -= 1
            self.num_refused -= 1
        if self._num_passed == len(self._pending):
            self._open |= self._pending
            self._pending.clear()
            self._num_passed = 0


class PeerMonitor:
    """Follows the connections of a bound socket.

    Args:
        socket: the socket.
        monitor: on which ZeroMQ reports its `WATCHED` events, if that was made before.
    """

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None = None) -> None:
        self._socket = socket
        self._monitor = monitor or socket.get_monitor_socket(WATCHED)
        self._handshakes = Handshakes()
        self.hear()  # its descriptor reports changes since the last look only

    @property
    def num_refused(self) -> int:
        """How many peers were refused: without a key, with a wrong one, with one of no list."""
        return self._handshakes.num_refused

    def fileno(self) -> int:
        """Return the descriptor to poll, upon which `hear` has something to do."""
        return int(self._monitor.getsockopt(zmq.FD))

    def hear(self) -> bool:
        """Take in all events; return whether a connection has ended."""
        have_ended = False
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, _ = self._monitor.recv_multipart()
            number = int.from_bytes(event[:2], sys.byteorder)
            descriptor = int.from_bytes(event[2:6], sys.byteorder)
            if number == zmq.EVENT_ACCEPTED:
                self._handshakes.accepted(descriptor)
            elif number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes.passed()
            else:
                self._handshakes.ended(descriptor)
                have_ended = True
        return have_ended

    def close(self) -> None:
        """Stop following the socket, before it is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
