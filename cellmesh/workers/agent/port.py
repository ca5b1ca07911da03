"""The agent's socket for controllers: a socket file where all of the mesh is on one host, else TCP,
encrypted, for allowed keys only, and watched, as no process number tells whether a controller on
another host lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ...wire import transport
from ...wire.curve import AllowList, KeyPair, PeerMonitor, public_of
from ...wire.ticket import Ticket
from .events import Events, Order

# How long an agent waits for its first controller, once all hosts may have started.
_FIRST_S = 60.0
# When a connection's end is reported, the ROUTER may need a moment to know of it.
_SETTLE_S = 0.05
# An agent gives its controller up so much later than the controller the host: a controller that
# comes back to an agent which has left it must know that the agent's messages begin again.
_LATER_S = 5.0


class Port:
    """A bound ROUTER.

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
        is_remote: whether controllers may be on other hosts.
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
        part, secret = ticket.part, ticket.curve_secret
        self.is_remote = ticket.host is not None
        self._lease_s = ticket.host_lease_s
        self._is_reached, self._gone, self._refused = is_reached, gone, refused
        self._look_at: float | None = None  # when to see whether the controller has a connection
        self._gone_at: float | None = None  # when to give it up
        self.endpoint = ticket.agent_endpoint
        if not self.is_remote:
            self.socket = transport.bind_router(context, self.endpoint)
            return
        self._gone_at = time.monotonic() + part.start_timeout_s + _FIRST_S
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
        return self._monitor.num_refused if self.is_remote else 0

    def _hear_monitor(self) -> None:
        if self._monitor.hear():
            if self._look_at is None:
                self._look_at = time.monotonic() + _SETTLE_S
            self._refused()

    def welcomed(self) -> None:
        """Note that a controller has a connection."""
        self._gone_at = None

    def tick(self, now: float) -> None:
        """Act on time-outs that have passed."""
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            if self._gone_at is None and not self._is_reached():
                self._gone_at = now + self._lease_s + _LATER_S
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = None
            if not self._is_reached():
                self._gone()

    def deadline(self) -> float | None:
        """Return when `tick` must be called; None if no time-out runs."""
        due = (self._look_at, self._gone_at)
        return min((at for at in due if at is not None), default=None)

    def close(self) -> None:
        """Close what belongs to the ROUTER beside itself."""
        if self.is_remote:
            self._monitor.close()
            self._allowed.close()
