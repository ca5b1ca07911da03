"""The agent's TCP socket: it tells when a connection has ended, and whether a peer is there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from cellmesh.wire import transport
from cellmesh.wire.curve import KeyPair, new_keys, use_curve
from cellmesh.wire.faults import Faults
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.ticket import Ticket
from cellmesh.workers.agent.events import Events
from cellmesh.workers.agent.tcp_port import TcpPort

WAIT_S = 20.0


def ticket_of(controller: KeyPair, agent: KeyPair) -> Ticket:
    return Ticket(
        name="t",
        key="00",
        directory="/t",
        num_ranks=1,
        backend="gloo",
        mesh_dim_names=(),
        mesh_shape=(),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=1,
        created_at=0.0,
        host=HostPart(0, 1, "a", 0, 1, controller.public, address="127.0.0.1"),
        curve_secret=agent.secret,
    )


def test_agent_waits_for_its_controller_for_longer_than_the_start_may_take() -> None:
    given = ticket_of(new_keys(), new_keys())
    assert given.host is not None
    part = msgspec.structs.replace(given.host, start_timeout_s=600.0)
    ticket = msgspec.structs.replace(given, host=part)
    context: zmq.Context[transport.Socket] = zmq.Context()
    gone: list[None] = []
    began = time.monotonic()
    port = TcpPort(
        context,
        ticket,
        Events(Faults("the test", print)),
        bool,
        lambda: gone.append(None),
        lambda: None,
    )
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
    port = TcpPort(context, ticket, events, bool, lambda: None, lambda: ended.append(None))
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


@contextmanager
def service(port: int, banner: bytes, met: Callable[[], None]) -> Iterator[None]:
    """A process that has the port, says something of its own, and closes each connection."""
    with socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(banner)
                met()

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def other_mesh(port: int, met: Callable[[], None]) -> Iterator[None]:
    """A notebook that has the port for another mesh."""
    context: zmq.Context[transport.Socket] = zmq.Context()
    keys = (new_keys().secret, new_keys().public)
    dealer, monitor = transport.connect_dealer(
        context, f"tcp://127.0.0.1:{port}", b"C2", keys, binds=True
    )
    thread = threading.Thread(target=lambda: (monitor.poll(), met()))
    thread.start()
    yield
    thread.join()
    dealer.disable_monitor()
    context.destroy(linger=0)


@pytest.mark.parametrize("stranger", ["closes", "sshd", "other mesh"])
def test_port_that_a_stranger_had_is_dialed_until_the_controller_has_it(stranger: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = listener.getsockname()[1]
    events = Events(Faults("the test", print))
    controller, agent = new_keys(), new_keys()
    context: zmq.Context[transport.Socket] = zmq.Context()
    tcp = TcpPort(context, ticket_of(controller, agent), events, bool, lambda: None, lambda: None)
    deadline = time.monotonic() + WAIT_S

    def serve_until(is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert time.monotonic() < deadline
            events.wait(0.02)
            tcp.tick(time.monotonic())

    met = threading.Event()
    banner = b"SSH-2.0-x\r\n" if stranger == "sshd" else b""
    with other_mesh(at, met.set) if stranger == "other mesh" else service(at, banner, met.set):
        tcp.dial(f"tcp://127.0.0.1:{at}")
        serve_until(met.is_set)
        serve_until(lambda: tcp._dial_at is not None)
    dealer, monitor = transport.connect_dealer(
        context, f"tcp://127.0.0.1:{at}", b"C1", (controller.secret, agent.public), binds=True
    )
    serve_until(lambda: any(transport.hear_connection(monitor)))
    assert tcp.num_refused == 0
    dealer.disable_monitor()
    monitor.close()
    dealer.close()
    tcp.close()
    tcp.socket.close()
    context.term()
