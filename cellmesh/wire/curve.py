"""CURVE for ZeroMQ's TCP sockets: keys made for each mesh, and an allow-list of peers' keys.

ZeroMQ's CurveZMQ (rfc.zeromq.org/spec/26) encrypts and authenticates both sides; which clients a
server accepts is asked over ZAP (rfc.zeromq.org/spec/27), before a byte of theirs is handed on.

Refused peers are counted from the events of ZeroMQ's monitor. ZeroMQ says by its descriptor which
connection was accepted and which has ended, but not which one has passed the handshake, and says
nothing of a peer that does not speak its protocol at all. So a connection that ends counts as
refused unless it is one of those that have passed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from .own_file import Secret, SecretBytes

_ZAP = "inproc://zeromq.zap.01"
# How long a peer may take for the handshake, in ms.
_HANDSHAKE_MS = 5000


@dataclass(frozen=True)
class KeyPair:
    """A key pair of CURVE's, in Z85."""

    public: str
    secret: Secret


def new_keys() -> KeyPair:
    """Make a key pair."""
    public, secret = map(SecretBytes, zmq.curve_keypair())
    return KeyPair(public.decode(), Secret(secret.decode()))


def public_of(secret: Secret) -> str:
    """Return the public key of a secret one."""
    return str(zmq.curve_public(secret.encode()).decode())


def serve_curve(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Have a socket accept peers that know its public key; an `AllowList` says which of them."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"cellmesh")
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def use_curve(socket: zmq.Socket[bytes], own_secret: Secret, server_public: str) -> None:
    """Have a socket connect to the server with this public key only."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own_secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_of(own_secret).encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


class AllowList:
    """Answers ZeroMQ's questions whether a client may connect; make it before the server binds.

    Args:
        context: of the server's socket.
        public_keys: of the clients that may (Z85).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_keys: Collection[str]):
        self._allowed = {z85.decode(key) for key in public_keys}
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP)

    def fileno(self) -> int:
        """The descriptor to poll; it reports changes only, so `serve` until nothing is there."""
        return int(self._socket.getsockopt(zmq.FD))

    def serve(self) -> None:
        """Answer all questions that have arrived."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            version, request, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
            is_allowed = mechanism == b"CURVE" and credentials[0] in self._allowed
            status = (b"200", b"OK") if is_allowed else (b"400", b"no key of this mesh")
            self._socket.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


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
