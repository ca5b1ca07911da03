"""The controller's connection to an agent on another host, with real sockets."""

from __future__ import annotations

import socket
import time

from cellmesh.controller.session.connection import Connection
from cellmesh.wire.curve import new_keys
from cellmesh.wire.ticket import new_key


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
