"""The controller's connection to an agent on another host, with real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import zmq

from cellmesh.controller.session.connection import Connection
from cellmesh.wire import transport
from cellmesh.wire.attach import Hello, Welcome
from cellmesh.wire.codec import Parcel, at_agent_from_controller, encode
from cellmesh.wire.curve import KeyPair, new_keys
from cellmesh.wire.messages import PROTOCOL
from cellmesh.wire.reliable import Reliable
from cellmesh.wire.ticket import new_key

WAIT_S = 20.0


def test_connection_that_never_opens_counts_as_lost() -> None:
    """The port is closed: ZeroMQ tries for ever, and reports nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    keys = new_keys().secret, new_keys().public
    connection = Connection(f"tcp://127.0.0.1:{port}", new_key(), steal=False, keys=keys)
    now = time.monotonic()
    connection.tick(now)
    assert connection.lost_at is None
    due = connection.deadline()
    assert due is not None
    assert due > now
    connection.tick(due)
    assert connection.lost_at == due
    assert connection.deadline() is None
    connection.close()


def test_connection_to_an_agent_of_this_host_is_waited_for() -> None:
    connection = Connection("ipc:///tmp/cellmesh-nobody-listens", new_key(), steal=False)
    assert connection.deadline() is None
    connection.close()


def connect(endpoint: str, agent: KeyPair) -> Connection:
    return Connection(endpoint, new_key(), steal=False, keys=(new_keys().secret, agent.public))


def hear_until(is_done: Callable[[], bool], connection: Connection) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline
        hear(connection)


def test_connection_that_broke_is_made_again_under_another_name() -> None:
    """ZeroMQ may close a ROUTER's end of a connection whose name an older connection has."""
    agent = new_keys()
    with zmq.Context() as context:
        router = transport.bind_router(context, "tcp://127.0.0.1:*", agent)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        connection = connect(endpoint, agent)
        first, hello = greeting(connection, router)
        router.close()
        hear_until(lambda: connection.lost_at is not None, connection)
        router = transport.bind_router(context, endpoint, agent)
        second, hello_again = greeting(connection, router)
        assert hello == hello_again
        assert first != second
        connection.close()
        router.close()


def test_greeting_that_is_not_answered_counts_as_a_loss_until_it_is() -> None:
    agent = new_keys()
    with zmq.Context() as context:
        router = transport.bind_router(context, "tcp://127.0.0.1:*", agent)
        connection = connect(router.getsockopt_string(zmq.LAST_ENDPOINT), agent)
        name, _ = greeting(connection, router)
        due = connection.deadline()
        assert due is not None
        connection.tick(due)
        assert connection.lost_at == due
        welcome = Welcome(PROTOCOL, 1, "a", 0, 0, ())
        preamble = Reliable[None]().wrap_aside()
        transport.send(router, [name, preamble, *encode([Parcel(welcome)])])
        hear_until(lambda: connection.lost_at is None, connection)
        assert connection.deadline() is None
        connection.close()
        router.close()


def hear(connection: Connection) -> None:
    for number in connection.descriptors():
        connection.note_ready(number)
    list(connection.hear(time.monotonic()))


def greeting(connection: Connection, router: transport.Socket) -> tuple[bytes, Hello]:
    """Return the name of a connection at a ROUTER, and the message that it begins with."""
    hear_until(lambda: bool(router.poll(10)), connection)
    name, _, *frames = transport.receive(router)
    (parcel,) = at_agent_from_controller().decode(frames)
    assert isinstance(parcel.verb, Hello)
    return bytes(name), parcel.verb
