"""The agent's end of its connection to controllers on other hosts, with real sockets."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from cellmesh.controller.session.connection import Connection
from cellmesh.wire import transport
from cellmesh.wire.attach import Detached, Refused
from cellmesh.wire.codec import Parcel
from cellmesh.wire.curve import new_keys
from cellmesh.wire.faults import Faults
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.messages import MakeStore, Progress
from cellmesh.wire.ticket import Ticket
from cellmesh.workers.agent.agent import Agent
from cellmesh.workers.agent.controller_port import ControllerPort
from cellmesh.workers.agent.events import Events
from cellmesh.workers.agent.port import Port

WAIT_S = 20.0
Connect = Callable[[], Connection]


def make_ticket(directory: Path) -> tuple[Ticket, tuple[str, str]]:
    """Return the ticket of an agent that listens on the loopback, and a controller's keys."""
    controller, agent = new_keys(), new_keys()
    ticket = Ticket(
        name="t", key=os.urandom(16).hex(), directory=str(directory), num_ranks=1, backend="gloo",
        mesh_dim_names=(), mesh_shape=(), preload=(), sys_path=(), cwd="/",
        controller_pid=os.getpid(), created_at=0.0, curve_secret=agent.secret,
        host=HostPart(
            0, 1, "a", 0, 1, controller.public, address="127.0.0.1", start_timeout_s=600.0
        ),
    )  # fmt: skip
    return ticket, (controller.secret, agent.public)


def make_port(directory: Path, heard: list[Any]) -> tuple[ControllerPort, Events, Connect]:
    """Return an agent's port, its loop, and what a controller connects to it with."""
    ticket, keys = make_ticket(directory)
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
    endpoint = attachment.port.endpoint
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


def test_agent_waits_for_its_controller_as_long_as_the_start_may_take(tmp_path: Path) -> None:
    ticket, _ = make_ticket(tmp_path)
    context: zmq.Context[transport.Socket] = zmq.Context()
    gone: list[None] = []
    began = time.monotonic()
    events = Events(Faults("the test", print))
    port = Port(context, ticket, events, bool, lambda: gone.append(None), lambda: None)
    port.tick(began + 600)
    assert not gone
    port.tick(time.monotonic() + 1000)
    assert gone
    port.close()
    port.socket.close()
    context.term()


@pytest.mark.parametrize(
    ("state", "texts"), [("starting", ["OSError: [Errno 5] odd"]), ("ready", [])]
)
def test_an_action_that_fails_fails_a_start_and_ends_no_mesh_that_runs(
    state: str, texts: list[str]
) -> None:
    said: list[str] = []
    actions = [OSError(5, "odd")]

    def refuse(action: Any) -> None:
        raise action

    agent: Any = Agent.__new__(Agent)
    agent._faults, agent._num_faults, agent._start_error = Faults("the agent", id), 0, None
    agent._controller = SimpleNamespace(may_be_readable=False, tick=lambda now: None)
    agent._supervisor = SimpleNamespace(
        state=state,
        tick=lambda now: [actions.pop()] if actions else [],
        fail=lambda text: said.append(text) or [],
    )
    agent._carry_out = refuse
    for now in range(3):
        agent._tick(float(now))
    assert (said, agent._faults.num) == (texts, 1)
