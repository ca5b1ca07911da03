"""CURVE for ZeroMQ's TCP sockets: keys made for each mesh, and an allow-list of peers' keys.

ZeroMQ's CurveZMQ (rfc.zeromq.org/spec/26) encrypts and authenticates both sides; over ZAP
(rfc.zeromq.org/spec/27) ZeroMQ asks the server whether to accept a client, before it hands on a
byte of the client's.

Refused peers are counted from the events of ZeroMQ's monitor. These give the descriptors of
accepted and of ended connections, but not of connections that have passed the handshake, and
nothing about a peer that does not use ZeroMQ's protocol. So a connection that ends counts as
refused unless it has passed the handshake.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import msgspec
import zmq
from zmq.utils import z85

from .own_file import Secret, SecretBytes

_ZAP = "inproc://zeromq.zap.01"
# How long a peer may take for the handshake, in ms.
_HANDSHAKE_MS = 5000


class KeyPair(msgspec.Struct, frozen=True):
    """A public and a secret key of CURVE, in Z85."""

    public: str
    secret: Secret


def new_keys() -> KeyPair:
    """Make a new pair of CURVE keys."""
    public, secret = map(SecretBytes, zmq.curve_keypair())
    return KeyPair(public.decode(), Secret(secret.decode()))


def public_of(secret: Secret) -> str:
    """Return the public CURVE key that belongs to a secret key."""
    return str(zmq.curve_public(secret.encode()).decode())


def serve_curve(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Make a socket a CURVE server; an `AllowList` selects the clients that it accepts."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"cellmesh")
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def use_curve(socket: zmq.Socket[bytes], own_secret: Secret, server_public: str) -> None:
    """Make a socket a CURVE client that connects only to the server with this public key."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own_secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_of(own_secret).encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


class AllowList:
    """Accepts or refuses clients of a CURVE server by their public keys; must be created before the
    server's socket is bound.

    Args:
        context: ZeroMQ context of the server's socket.
        public_keys: public keys of the clients to admit (Z85).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_keys: Collection[str]):
        self._allowed = {z85.decode(key) for key in public_keys}
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP)

    def fileno(self) -> int:
        """Return the file descriptor to poll; it reports only changes, so `serve` must be called
        after each report.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def serve(self) -> None:
        """Answer ZeroMQ's pending questions on whether to accept a client."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            version, request, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
            is_allowed = mechanism == b"CURVE" and credentials[0] in self._allowed
            status = (b"200", b"OK") if is_allowed else (b"400", b"no key of this mesh")
            self._socket.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        """Close the socket on which ZeroMQ asks whether to accept clients."""
        self._socket.close(linger=0)


# The events that `PeerMonitor` needs from a socket's monitor.
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Handshakes(msgspec.Struct):
    """Counts the connections of one socket that fail CURVE's handshake; does no I/O.

    Attributes:
        num_refused: number of connections that ended without a handshake.
    """

    num_refused: int = 0
    # Accepted; some of them may have passed.
    _pending: set[int] = msgspec.field(default_factory=set)
    _open: set[int] = msgspec.field(default_factory=set)  # passed
    _num_passed: int = 0  # of the pending ones

    def accepted(self, descriptor: int) -> None:
        """Record that the socket has accepted a connection, whose handshake is still open."""
        self._pending.add(descriptor)

    def passed(self) -> None:
        """Record that one of the accepted connections, an unknown one, has passed the handshake."""
        self._num_passed += 1
        self._settle()

    def ended(self, descriptor: int) -> None:
        """Record that a connection has ended, and count it as refused unless it had passed the
        handshake.
        """
        if descriptor in self._open:
            self._open.discard(descriptor)
        else:
            self._pending.discard(descriptor)
            self.num_refused += 1
            self._settle()

    def _settle(self) -> None:
        if self._num_passed > len(self._pending):  # a connection counted as refused had passed
            self._num_passed -= 1
            self.num_refused -= 1
        if self._num_passed == len(self._pending):
            self._open |= self._pending
            self._pending.clear()
            self._num_passed = 0


class PeerMonitor:
    """Reads the connection events of a bound ZeroMQ socket, and counts refused peers.

    Args:
        socket: the socket.
        monitor: the socket's monitor of `WATCHED` events, if one exists already.
    """

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None = None) -> None:
        self._socket = socket
        self._monitor = monitor or socket.get_monitor_socket(WATCHED)
        self._handshakes = Handshakes()
        self.hear()  # the descriptor reports only changes since the last read

    @property
    def num_refused(self) -> int:
        """Number of refused peers: those without a key, with a wrong key, or with a key not on the
        `AllowList`.
        """
        return self._handshakes.num_refused

    def fileno(self) -> int:
        """Return the file descriptor to poll for connection events; once it is readable, `hear`
        must be called.
        """
        return int(self._monitor.getsockopt(zmq.FD))

    def hear(self) -> bool:
        """Read all connection events that have arrived; return whether a connection has ended."""
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
        """Stop reading the socket's connection events; to be called before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
