"""The agent's TCP socket for controllers: encrypted, for allowed keys only, and watched, as no
process number tells whether a controller on another host lives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq

from ...wire import transport
from ...wire.curve import AllowList, KeyPair, public_of
from ...wire.handshakes import PeerMonitor
from ...wire.ticket import Ticket
from .events import Events, Order

# How long an agent waits for its first controller, once all hosts may have started.
_FIRST_S = 60.0
# When a connection's end is reported, the ROUTER may need a moment to know of it.
_SETTLE_S = 0.05
# An agent gives its controller up so much later than the controller the host: a controller that
# comes back to an agent which has left it must know that the agent's messages begin again.
_LATER_S = 5.0
# How long it waits before it connects again to a controller's port: first, and at most.
_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0


class TcpPort:
    """A bound ROUTER on TCP.

    Args:
        context: the agent's ZeroMQ context.
        ticket: the agent's, with its address, its keys, and the controllers' key.
        events: the agent's loop.
        is_reached: whether the attached controller has a connection.
        gone: called when it has had none for the ticket's `host_lease_s`.
        refused: called when peers may have been refused, and the ROUTER was used.

    Attributes:
        socket: the ROUTER.
        endpoint: where it is bound.
    """

    def __init__(
        self,
        context: zmq.Context[transport.Socket],
        ticket: Ticket,
        events: Events,
        is_reached: Callable[[], bool],
        gone: Callable[[], None],
        refused: Callable[[], None],
    ) -> None:
        part, secret = ticket.host, ticket.curve_secret
        assert part is not None
        self._lease_s = ticket.host_lease_s
        self._is_reached, self._gone, self._refused = is_reached, gone, refused
        self._look_at: float | None = None  # when to see whether the controller has a connection
        # When to give it up.
        self._gone_at: float | None = time.monotonic() + part.start_timeout_s + _FIRST_S
        self._dialed, self._pause_s = "", _PAUSE_S
        self._dial_at: float | None = None  # when to connect again to a controller's port
        self._allowed = AllowList(context, [part.controller_key])
        host = f"[{part.address}]" if ":" in part.address else part.address
        keys = KeyPair(public_of(secret), secret)
        self.socket = transport.bind_router(context, f"tcp://{host}:*", keys)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._monitor = PeerMonitor(self.socket)
        events.add(self._allowed.fileno(), Order.SOCKET, lambda event: self._allowed.serve())
        events.add(self._monitor.fileno(), Order.SOCKET, lambda event: self._hear_monitor())

    @property
    def num_refused(self) -> int:
        """How many peers were refused: without a key, with a wrong one, with none of this mesh."""
        return self._monitor.num_refused

    def _hear_monitor(self) -> None:
        dialed = self._monitor.dialed
        num_failed = dialed.num_refused
        if self._monitor.hear():
            if self._look_at is None:
                self._look_at = time.monotonic() + _SETTLE_S
            if dialed.num_refused != num_failed and not dialed.is_begun:
                self._hang_up()
            self._refused()
        if dialed.is_connected:
            self._pause_s = _PAUSE_S

    def _hang_up(self) -> None:
        """Leave a port alone for a while that another process has than a controller of the mesh:
        ZeroMQ would connect again at once, or, if that process speaks otherwise, never.
        """
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has given it up
            self.socket.disconnect(self._dialed)
        self._dial_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def welcomed(self) -> None:
        """Note that a controller has a connection."""
        self._gone_at = None

    def tick(self, now: float) -> bool:
        """Act on time-outs that have passed; return whether the ROUTER was used."""
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            if self._gone_at is None and not self._is_reached():
                self._gone_at = now + self._lease_s + _LATER_S
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = None
            if not self._is_reached():
                self._gone()
        if self._dial_at is None or now < self._dial_at:
            return False
        self._dial_at = None
        self.socket.connect(self._dialed)
        return True

    def deadline(self) -> float | None:
        """Return when `tick` must be called; None if no time-out runs."""
        due = (self._look_at, self._gone_at, self._dial_at)
        return min((at for at in due if at is not None), default=None)

    def dial(self, endpoint: str) -> None:
        """Also connect to a controller that listens: it is authenticated as those that connect."""
        # What one controller has not received must not reach the next one that listens there.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, int(_PAUSE_S * 1000))
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(_MAX_PAUSE_S * 1000))
        self._dialed = endpoint
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Close what belongs to the ROUTER beside itself."""
        self._monitor.close()
        self._allowed.close()
