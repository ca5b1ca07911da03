"""The agent's socket for controllers: a Unix socket in a mesh on one host, else a TCP socket.

TCP is encrypted, admits known keys only, and is monitored, as no process number shows whether a
controller on another host is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ...wire import transport
from ...wire.curve import AllowList, KeyPair, PeerMonitor, public_of
from ...wire.ticket import Ticket
from .events import Events, Order

# How long an agent waits for its first controller, counted from the end of the start time-out.
_FIRST_S = 60.0
# The ROUTER may learn of a connection's end a moment after the monitor.
_SETTLE_S = 0.05
# An agent gives up its controller this much later than the controller gives up the host: a
# controller that reconnects must know whether the agent has started a new sequence of messages.
_LATER_S = 5.0


class Port:
    """The bound ROUTER socket of an agent.

    Args:
        context: the agent's ZeroMQ context.
        ticket: the agent's ticket, with its address, its keys, and the controllers' key.
        events: the agent's event loop.
        is_reached: returns whether the attached controller has a connection.
        gone: called when the controller has had no connection for the ticket's `host_lease_s`.
        refused: called when peers may have been refused, and the ROUTER was used.

    Attributes:
        socket: the ROUTER.
        endpoint: its ZeroMQ endpoint.
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
        self._look_at: float | None = None  # when to check whether the controller has a connection
        self._gone_at: float | None = None  # when to give up the controller
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
        """Number of refused peers: without a key, or with a wrong or unknown one."""
        return self._monitor.num_refused if self.is_remote else 0

    def _hear_monitor(self) -> None:
        if self._monitor.hear():
            if self._look_at is None:
                self._look_at = time.monotonic() + _SETTLE_S
            self._refused()

    def welcomed(self) -> None:
        """Record that a controller has connected, which ends the wait for one."""
        self._gone_at = None

    def tick(self, now: float) -> None:
        """Act on time-outs that have passed: check whether the controller is still connected, or
        give it up.
        """
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            if self._gone_at is None and not self._is_reached():
                self._gone_at = now + self._lease_s + _LATER_S
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = None
            if not self._is_reached():
                self._gone()

    def deadline(self) -> float | None:
        """Return when `Port.tick` must be called next; None if no time-out runs."""
        due = (self._look_at, self._gone_at)
        return min((at for at in due if at is not None), default=None)

    def close(self) -> None:
        """Close the monitor and the list of allowed keys; the caller closes the ROUTER."""
        if self.is_remote:
            self._monitor.close()
            self._allowed.close()
