"""The agent's TCP socket for controllers: encrypted, for allowed keys only, and watched, as no
process number tells whether a controller on another host lives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import zmq

from ...wire import transport
from ...wire.codec import Frame
from ...wire.curve import AllowList, KeyPair
from ...wire.hosts import HostPart
from .events import Events, Order

_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class TcpPort:
    """A bound ROUTER on TCP.

    Args:
        context: the agent's ZeroMQ context.
        part: what the agent runs, with its address and the controllers' key.
        keys: the agent's.
        events: the agent's loop.
        lost: called when a connection has ended, whose ever it was.

    Attributes:
        socket: the ROUTER.
        endpoint: where it is bound.
        num_refused: how many peers were refused: without a key, with a wrong one, or with none of
            this mesh.
    """

    def __init__(
        self,
        context: zmq.Context[transport.Socket],
        part: HostPart,
        keys: KeyPair,
        events: Events,
        lost: Callable[[], None],
    ) -> None:
        self._lost = lost
        self.num_refused = 0
        self._allowed = AllowList(context, [part.controller_key])
        host = f"[{part.address}]" if ":" in part.address else part.address
        self.socket = transport.bind_router(context, f"tcp://{host}:*", keys)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        watched = zmq.EVENT_DISCONNECTED | _REFUSED
        self._monitor = self.socket.get_monitor_socket(watched)
        events.add(self._allowed.fileno(), Order.SOCKET, lambda event: self._allowed.serve())
        events.add(
            int(self._monitor.getsockopt(zmq.FD)), Order.SOCKET, lambda event: self._hear_monitor()
        )

        self._hear_monitor()  # ZeroMQ signals on the descriptor what comes after a first look only

    def reaches(self, identity: bytes, frames: list[Frame]) -> bool:
        """Send a message to a peer; return whether the peer is connected."""
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            transport.send(self.socket, [identity, *frames])
        except zmq.ZMQError:
            return False
        finally:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return True

    def _hear_monitor(self) -> None:
        while transport.readable(self._monitor):
            event = self._monitor.recv_multipart()[0]
            if int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_DISCONNECTED:
                self._lost()
            else:
                self.num_refused += 1

    def dial(self, endpoint: str) -> None:
        """Also connect to a controller that listens: it is authenticated as those that connect."""
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Close what belongs to the ROUTER beside itself."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._allowed.close()
