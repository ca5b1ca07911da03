"""CURVE for ZeroMQ's TCP sockets: keys made for each mesh, and an allow-list of peers' keys.

ZeroMQ's CurveZMQ (rfc.zeromq.org/spec/26) encrypts and authenticates both sides; which clients a
server accepts is asked over ZAP (rfc.zeromq.org/spec/27), before a byte of theirs is handed on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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
