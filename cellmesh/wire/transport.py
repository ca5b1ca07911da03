"""Makes and uses ZeroMQ sockets, with the options that controller and agent both need.

Local meshes use ``ipc`` sockets in a directory of mode 0700. ZeroMQ bounds no queue (`SNDHWM` 0),
as a ROUTER drops silently at its high-water mark: what may be under way is bounded by runs in
flight (`bounds`), and by what the other side has acknowledged (`reliable`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import zmq

from ..errors import HostError
from .codec import MAX_FRAME_BYTES, Frame
from .curve import KeyPair, serve_curve, use_curve
from .hosts import HEARTBEAT_S, SILENT_S
from .own_file import Secret

# Larger buffers are handed to ZeroMQ without a copy; smaller ones are cheaper copied.
ZERO_COPY_BYTES = 256 * 1024

Socket = zmq.Socket[bytes]
# pyzmq's own `send` is a Python function round this one.
_send: Any = zmq.backend.Socket.send
_poll: Any = zmq.backend.zmq_poll
_SNDMORE, _POLLIN = int(zmq.SNDMORE), int(zmq.POLLIN)


def _configure(socket: Socket) -> Socket:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


def _watch_peers(socket: Socket) -> Socket:
    """Have ZeroMQ close TCP connections on which nothing was heard for `SILENT_S`."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENT_S * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    return socket


def make_context(num_peers: int) -> zmq.Context[Socket]:
    """Make a ZeroMQ context for the sockets of many peers, with a thread of its own for each as far
    as there are cores. A context has room for 1,023 sockets by itself, and each peer takes three.

    Args:
        num_peers: how many there are; more may come.
    """
    context: zmq.Context[Socket] = zmq.Context(min(num_peers, os.cpu_count() or 1))
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return context


def bind_router(context: zmq.Context[Socket], endpoint: str, keys: KeyPair | None = None) -> Socket:
    """Make an agent's ROUTER socket, bound to an endpoint.

    Args:
        context: the process's ZeroMQ context.
        endpoint: ``ipc://...`` or ``tcp://...``.
        keys: CURVE's, of a TCP endpoint.

    Raises:
        HostError: the endpoint cannot be bound.
    """
    socket = _configure(context.socket(zmq.ROUTER))
    # A controller whose connection broke reconnects under its name, maybe before the old one is
    # known dead.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if keys is not None:
        serve_curve(_watch_peers(socket), keys)
    try:
        socket.bind(endpoint)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    except zmq.ZMQError as e:
        socket.close()
        raise HostError(f"cannot bind {endpoint}: {e}") from e
    return socket


def connect_dealer(
    context: zmq.Context[Socket],
    endpoint: str,
    identity: bytes,
    keys: tuple[Secret, str] | None = None,
) -> tuple[Socket, Socket]:
    """Make a controller's DEALER socket, connected to an agent's ROUTER, which need not exist yet.

    Args:
        context: the process's ZeroMQ context.
        endpoint: the agent's.
        identity: the name under which the ROUTER knows it, until `connect_again`.
        keys: of a TCP endpoint: CURVE's own secret key, and the agent's public key.

    Returns:
        The socket, and one on which `hear_connection` hears of its connections.

    Raises:
        HostError: this process may have no more sockets.
    """
    socket = monitor = None
    made_or_lost = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    try:
        socket = _configure(context.socket(zmq.DEALER))
        socket.setsockopt(zmq.ROUTING_ID, identity)
        if keys is not None:
            use_curve(_watch_peers(socket), *keys)
        monitor = socket.get_monitor_socket(made_or_lost)
        # The agent binds some milliseconds after its launcher returns; the default of 100 ms would
        # show.
        socket.setsockopt(zmq.RECONNECT_IVL, 5)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(endpoint)
    except zmq.ZMQError as e:
        if socket is not None and monitor is not None:
            socket.disable_monitor()
            monitor.close(linger=0)
        if socket is not None:
            socket.close(linger=0)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        hint = f" ({limit} a process: raise `ulimit -n`)" if e.errno == errno.EMFILE else ""
        raise HostError(f"cannot use {endpoint}: {e}{hint}") from e
    return socket, monitor


def connect_again(dealer: Socket, endpoint: str, identity: bytes) -> None:
    """Connect a DEALER, whose connection broke, under another name; messages that it has not
    received or sent are dropped.

    Under the same name ZeroMQ's ROUTER (4.3.5) at times closes its end of the new connection
    together with that of the old one, and the connection itself stays: it receives nothing any more
    and drops what is sent.
    """
    with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has given it up
        dealer.disconnect(endpoint)
    dealer.setsockopt(zmq.ROUTING_ID, identity)
    dealer.connect(endpoint)


def hear_connection(monitor: Socket) -> Iterator[bool]:
    """Yield, for each change of a DEALER's connection, True if it was made, False if lost."""
    while readable(monitor):
        event = monitor.recv_multipart()[0]
        yield int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_HANDSHAKE_SUCCEEDED


def send(socket: Socket, frames: list[Frame]) -> None:
    """Send one message on a ZeroMQ socket; never blocks, as its queues are unbounded."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        large = len(frame) >= ZERO_COPY_BYTES
        _send(socket, frame, _SNDMORE if index < last else 0, copy=not large, track=False)


def reaches(router: Socket, frames: list[Frame]) -> bool:
    """Send one message on a ROUTER; return whether there is a connection to the peer."""
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        readable(router)  # has ZeroMQ take note of connections that have ended
        send(router, frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    finally:
        router.setsockopt(zmq.ROUTER_MANDATORY, 0)
    return True


def readable(socket: Socket) -> bool:
    """Return whether a message has arrived at a socket, as its descriptor reports changes only.

    Asking for the option itself costs more, as pyzmq makes enums of its number and value.
    """
    return bool(_poll([(socket, _POLLIN)], 0))


def receive(socket: Socket) -> list[Frame]:
    """Receive one message; blocks until there is one. Its first two frames, which are short, are
    copied.
    """
    frames: list[Frame] = []
    while True:
        part = socket.recv(copy=False)
        if len(frames) < 2:
            frames.append(part.bytes)
        else:
            # Arrays are rebuilt on this memory: it must be writable, which `bytes` is not.
            frame = part.buffer
            frames.append(bytearray(frame) if len(frame) < ZERO_COPY_BYTES else frame)
        if not part.more:  # known without asking for an option, which makes an enum
            return frames
