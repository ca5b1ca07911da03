"""The agent's TCP socket: it tells when a connection has ended, and whether a peer is there."""

from __future__ import annotations

import time

import msgspec
import zmq

from cellmesh.wire import transport
from cellmesh.wire.curve import KeyPair, new_keys, use_curve
from cellmesh.wire.faults import Faults
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.ticket import Ticket
from cellmesh.workers.agent.events import Events
from cellmesh.workers.agent.port import Port

WAIT_S = 20.0


def ticket_of(controller: KeyPair, agent: KeyPair) -> Ticket:
    return Ticket(
        name="t", key="00", directory="/t", num_ranks=1, backend="gloo", mesh_dim_names=(),
        mesh_shape=(), preload=(), sys_path=(), cwd="/", controller_pid=1, created_at=0.0,
        host=HostPart(0, 1, "a", 0, 1, controller.public, address="127.0.0.1"),
        curve_secret=agent.secret,
    )  # fmt: skip


def test_agent_waits_for_its_controller_for_longer_than_the_start_may_take() -> None:
    given = ticket_of(new_keys(), new_keys())
    assert given.host is not None
    part = msgspec.structs.replace(given.host, start_timeout_s=600.0)
    ticket = msgspec.structs.replace(given, host=part)
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


def test_ended_connection_is_told_and_its_peer_is_not_reached() -> None:
    ended: list[None] = []
    events = Events(Faults("the test", print))
    controller, agent = new_keys(), new_keys()
    ticket = ticket_of(controller, agent)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = Port(context, ticket, events, bool, lambda: None, lambda: ended.append(None))
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, b"C1")
    use_curve(dealer, controller.secret, agent.public)
    dealer.connect(port.endpoint)
    dealer.send(b"hello")
    deadline = time.monotonic() + WAIT_S
    while not port.socket.poll(0) and time.monotonic() < deadline:
        events.wait(0.05)
    assert port.socket.recv_multipart() == [b"C1", b"hello"]
    assert transport.reaches(port.socket, [b"C1", b"there?"])
    assert dealer.recv() == b"there?"
    assert not transport.reaches(port.socket, [b"C2", b"there?"])
    assert not ended
    dealer.close()
    while not ended and time.monotonic() < deadline:
        events.wait(0.05)
    assert ended
    while transport.reaches(port.socket, [b"C1", b"there?"]) and time.monotonic() < deadline:
        events.wait(0.05)
    assert not transport.reaches(port.socket, [b"C1", b"there?"])
    port.close()
    port.socket.close()
    context.term()
