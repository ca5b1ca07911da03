"""The agent's end of its connection to controllers on other hosts, with real sockets."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from cellmesh.controller.session.connection import Connection
from cellmesh.wire.codec import Parcel
from cellmesh.wire.curve import new_keys
from cellmesh.wire.faults import Faults
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.messages import MakeStore, Progress
from cellmesh.wire.ticket import Ticket
from cellmesh.workers.agent.controller_port import Attachment
from cellmesh.workers.agent.events import Events

WAIT_S = 20.0


def test_message_that_arrives_while_the_agent_looks_for_its_controller_is_heard(
    tmp_path: Path,
) -> None:
    """A look at a ROUTER's state takes in what its descriptor would have reported."""
    controller, agent = new_keys(), new_keys()
    ticket = Ticket(
        name="t",
        key=os.urandom(16).hex(),
        directory=str(tmp_path),
        num_ranks=1,
        backend="gloo",
        mesh_dim_names=(),
        mesh_shape=(),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=os.getpid(),
        created_at=0.0,
        host=HostPart(0, 1, "a", 0, 1, controller.public, address="127.0.0.1"),
        curve_secret=agent.secret,
    )
    heard: list[Any] = []
    events = Events(Faults("the test", print))
    attachment = Attachment(
        ticket,
        events,
        lambda parcels: heard.extend(verb for verb, _ in parcels),
        lambda: (Parcel(Progress("importing torch", 0)), [], ((), ())),
        lambda reason: None,
        lambda ranks: None,
        lambda: None,
    )
    assert attachment.port is not None
    endpoint, key = attachment.port.endpoint, ticket.key
    keys = controller.secret, agent.public
    connection = Connection(endpoint, key, steal=False, keys=keys)

    def step(patience_s: float = 0.01) -> None:
        events.wait(patience_s)
        if attachment.may_be_readable:
            attachment.serve()
        for number in connection.descriptors():
            connection.note_ready(number)
        list(connection.hear(time.monotonic()))

    deadline = time.monotonic() + WAIT_S
    while not connection._is_open and time.monotonic() < deadline:
        step()
    # A stranger leaves, upon which the agent looks whether its controller has left.
    address, _, number = endpoint.removeprefix("tcp://").rpartition(":")
    socket.create_connection((address, int(number))).close()
    while (look_at := attachment.port.deadline()) is None and time.monotonic() < deadline:
        step()
    assert look_at is not None
    descriptor = int(attachment._socket.getsockopt(zmq.FD))
    while attachment.may_be_readable:
        attachment.serve()
    connection.send([Parcel(MakeStore())])
    assert select.select([descriptor], [], [], WAIT_S)[0]
    attachment.tick(look_at)
    while not heard and time.monotonic() < deadline:
        step()
    assert heard == [MakeStore()]
    connection.close()
    attachment.close()
