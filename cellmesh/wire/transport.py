"""Makes and uses ZeroMQ sockets, with the options that controller and agent both need.

Local meshes use ``ipc`` sockets in a directory of mode 0700. ZeroMQ's queues are not bounded
(`SNDHWM` 0), as a ROUTER drops messages silently at its high-water mark: messages in flight are
bounded by the number of runs (`limits`) and by acknowledgements (`reliable`).
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

# Larger buffers are passed to ZeroMQ without a copy; copying smaller ones is cheaper.
ZERO_COPY_BYTES = 256 * 1024

Socket = zmq.Socket[bytes]
# pyzmq's own `send` is a Python wrapper of this one.
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
    """Make ZeroMQ close TCP connections on which nothing was received for `SILENT_S`, or nothing
    that was sent: while a full socket takes no more, ZeroMQ sends no heartbeats.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENT_S * 1000))
    socket.setsockopt(zmq.TCP_MAXRT, int(SILENT_S * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    return socket


def make_context(num_peers: int) -> zmq.Context[Socket]:
    """Make a ZeroMQ context for the sockets of many peers, with an I/O thread per peer, at most one
    per core. By default a context has room for 1,023 sockets, of which each peer takes three.

    Args:
        num_peers: number of peers at the start; more may be added.
    """
    context: zmq.Context[Socket] = zmq.Context(min(num_peers, os.cpu_count() or 1))
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return context


def bind_router(context: zmq.Context[Socket], endpoint: str, keys: KeyPair | None = None) -> Socket:
    """Make an agent's ROUTER socket, bound to an endpoint.

    Args:
        context: the process's ZeroMQ context.
        endpoint: ``ipc://...`` or ``tcp://...``.
        keys: the agent's keys of CURVE; None for an ``ipc`` endpoint.

    Raises:
        HostError: the endpoint cannot be bound.
    """
    socket = _configure(context.socket(zmq.ROUTER))
    # A controller whose connection broke reconnects under its name, maybe before the old connection
    # is known to be dead.
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
        endpoint: endpoint of the agent.
        identity: the socket's identity for the ROUTER, until `connect_again`.
        keys: CURVE's secret key of the controller and public key of the agent; None for an ``ipc``
            endpoint.

    Returns:
        The socket, and its monitor for `hear_connection`.

    Raises:
        HostError: this process cannot open more sockets.
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
        # delay the start noticeably.
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
    """Reconnect a DEALER whose connection broke, under another identity; messages that it has not
    sent or received yet are dropped.

    Under the same identity ZeroMQ's ROUTER (4.3.5) at times closes its end of the new connection
    together with that of the old one, while the connection itself stays open: it then receives no
    messages and drops those that are sent.
    """
    with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has closed it already
        dealer.disconnect(endpoint)
    dealer.setsockopt(zmq.ROUTING_ID, identity)
    dealer.connect(endpoint)


def hear_connection(monitor: Socket) -> Iterator[bool]:
    """Yield the changes of a DEALER's connection: True if it was made, False if it was lost."""
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
    """Send one message to a peer on a ROUTER socket; return False if the peer has no connection."""
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        readable(router)  # makes ZeroMQ process the end of connections
        send(router, frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    finally:
        router.setsockopt(zmq.ROUTER_MANDATORY, 0)
    return True


def readable(socket: Socket) -> bool:
    """Return whether a ZeroMQ socket has a message to read; poll does not show this, as the
    socket's descriptor reports only changes.

    Reading the option `EVENTS` costs more, as pyzmq converts its number and value to enums.
    """
    return bool(_poll([(socket, _POLLIN)], 0))


def receive(socket: Socket) -> list[Frame]:
    """Receive one message, with its first two (short) frames copied; blocks until one arrives."""
    frames: list[Frame] = []
    while True:
        part = socket.recv(copy=False)
        if len(frames) < 2:
            frames.append(part.bytes)
        else:
            # Arrays are rebuilt on this memory: it must be writable, which `bytes` is not.
            frame = part.buffer
            frames.append(bytearray(frame) if len(frame) < ZERO_COPY_BYTES else frame)
        if not part.more:  # cheaper than the option `RCVMORE`, which makes an enum
            return frames
