"""The agent's end of its connection to controllers on other hosts, with real sockets."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from cellmesh.controller.session.connection import Connection
from cellmesh.wire.attach import Detached, Refused
from cellmesh.wire.codec import Parcel
from cellmesh.wire.curve import new_keys
from cellmesh.wire.faults import Faults
from cellmesh.wire.messages import MakeStore, Progress
from cellmesh.workers.agent.controller_port import ControllerPort
from cellmesh.workers.agent.events import Events

from .test_port import ticket_of

WAIT_S = 20.0
Connect = Callable[[], Connection]


def make_port(directory: Path, heard: list[Any]) -> tuple[ControllerPort, Events, Connect]:
    """Return an agent's port, its loop, and what a controller connects to it with."""
    controller, agent = new_keys(), new_keys()
    ticket = msgspec.structs.replace(
        ticket_of(controller, agent),
        key=os.urandom(16).hex(),
        directory=str(directory),
        controller_pid=os.getpid(),
    )
    events = Events(Faults("the test", print))
    attachment = ControllerPort(
        ticket,
        events,
        lambda parcels: heard.extend(verb for verb, _ in parcels),
        lambda: (Parcel(Progress("importing torch", 0)), [], ((), ())),
        lambda reason: None,
        lambda ranks: None,
        lambda: None,
    )
    endpoint, keys = attachment.port.endpoint, (controller.secret, agent.public)
    return attachment, events, lambda: Connection(endpoint, ticket.key, steal=False, keys=keys)


def step(attachment: ControllerPort, events: Events, *connections: Connection) -> list[Any]:
    """Let both ends do what is to be done; return what the controller has heard."""
    events.wait(0.01)
    if attachment.may_be_readable:
        attachment.serve()
    said = []
    for connection in connections:
        for number in connection.descriptors():
            connection.note_ready(number)
        said += [parcel.verb for parcel in connection.hear(time.monotonic())]
    return said


def test_controller_goes_on_under_another_name(tmp_path: Path) -> None:
    """Each of its connections has a name of its own."""
    attachment, events, connect = make_port(tmp_path, [])
    broken, deadline = connect(), time.monotonic() + WAIT_S
    while not broken._is_open and time.monotonic() < deadline:
        step(attachment, events, broken)
    again = connect()
    again._hello = broken._hello
    said = []
    while not again._is_open and time.monotonic() < deadline:
        said += step(attachment, events, again)
    attachment.send([Parcel(Progress("forking", 0))])
    while Progress("forking", 0) not in said and time.monotonic() < deadline:
        said += step(attachment, events, again)
    assert not any(isinstance(verb, Detached | Refused) for verb in said)
    assert Progress("forking", 0) in said
    for connection in (broken, again):
        connection.close()
    attachment.close()


def test_message_that_arrives_while_the_agent_looks_for_its_controller_is_heard(
    tmp_path: Path,
) -> None:
    """A look at a ROUTER's state takes in what its descriptor would have reported."""
    heard: list[Any] = []
    attachment, events, connect = make_port(tmp_path, heard)
    endpoint, connection = attachment.port.endpoint, connect()
    deadline = time.monotonic() + WAIT_S
    while not connection._is_open and time.monotonic() < deadline:
        step(attachment, events, connection)
    # A stranger leaves, upon which the agent looks whether its controller has left.
    address, _, number = endpoint.removeprefix("tcp://").rpartition(":")
    socket.create_connection((address, int(number))).close()
    while (look_at := attachment.port.deadline()) is None and time.monotonic() < deadline:
        step(attachment, events, connection)
    assert look_at is not None
    descriptor = int(attachment._socket.getsockopt(zmq.FD))
    while attachment.may_be_readable:
        attachment.serve()
    connection.send([Parcel(MakeStore())])
    assert select.select([descriptor], [], [], WAIT_S)[0]
    attachment.tick(look_at)
    while not heard and time.monotonic() < deadline:
        step(attachment, events, connection)
    assert heard == [MakeStore()]
    connection.close()
    attachment.close()
