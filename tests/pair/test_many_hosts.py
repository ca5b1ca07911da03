"""A controller and 400 agents, with real sockets, in one process."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from cellmesh.controller.session.hosts.connections import Connections
from cellmesh.controller.session.standing import ask_agents
from cellmesh.wire import transport
from cellmesh.wire.attach import Hello, Inquire, Standing, Welcome
from cellmesh.wire.codec import Parcel, at_agent_from_controller, encode
from cellmesh.wire.curve import AllowList, new_keys
from cellmesh.wire.hosts import Host
from cellmesh.wire.messages import PROTOCOL
from cellmesh.wire.own_file import Secret
from cellmesh.wire.process import wait_readable
from cellmesh.wire.reliable import Reliable
from cellmesh.wire.ticket import Holder

from ..support.tickets import make_ticket

NUM_HOSTS = 400
SOFT_LIMIT = 1024  # of most systems


class Agents:
    """Agents that answer greetings and inquiries, on a thread."""

    def __init__(self) -> None:
        self._context = transport.make_context(NUM_HOSTS)
        controller, agent = new_keys(), new_keys()
        self.secret = controller.secret
        self._allowed = AllowList(self._context, [controller.public])
        self._sockets = [
            transport.bind_router(self._context, "tcp://127.0.0.1:*", agent)
            for _ in range(NUM_HOSTS)
        ]
        self.addresses = tuple(
            Host(f"h{index}", socket.getsockopt_string(zmq.LAST_ENDPOINT), agent.public, index, 1)
            for index, socket in enumerate(self._sockets)
        )
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        decode = at_agent_from_controller().decode
        sockets = {int(socket.getsockopt(zmq.FD)): socket for socket in self._sockets}
        while not self._has_ended.is_set():
            wait_readable([self._allowed.fileno(), *sockets], 0.05)
            self._allowed.serve()
            for socket in self._sockets:
                while transport.readable(socket):
                    identity, _, *frames = transport.receive(socket)
                    for verb, _ in decode(frames) if frames else ():
                        if isinstance(verb, Hello):
                            self._answer(socket, identity, Welcome(PROTOCOL, 1, "h"))
                        elif isinstance(verb, Inquire):
                            holder = Holder(controller_pid=1, is_attached=True, since=0.0)
                            self._answer(socket, identity, Standing(1, holder))

    @staticmethod
    def _answer(socket: transport.Socket, identity: transport.Frame, verb: object) -> None:
        frames = encode([Parcel(verb)])
        transport.send(socket, [identity, Reliable[None]().wrap_aside(), *frames])

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join()
        self._allowed.close()
        self._context.destroy(linger=0)


@pytest.fixture
def agents() -> Iterator[Agents]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    agents = Agents()
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, limits[1]))
    yield agents
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    agents.close()


def test_four_hundred_hosts_are_asked_and_connected_to(agents: Agents, tmp_path: Path) -> None:
    ticket = make_ticket(
        directory=str(tmp_path),
        num_ranks=NUM_HOSTS,
        agents=agents.addresses,
        key=Secret("00" * 32),
        curve_secret=agents.secret,
    )
    standings = ask_agents(ticket, timeout_s=60)
    assert [each.agent.name for each in standings if each.standing is None] == []

    connections = Connections(ticket, steal=False)
    connections.open()
    poll = connections.descriptors()
    is_welcomed = False
    deadline = time.monotonic() + 60
    while not is_welcomed and time.monotonic() < deadline:
        for number in wait_readable(poll, 1):
            connections.note_ready(number)
        heard = list(connections.hear(time.monotonic()))
        is_welcomed = any(type(each.verb) is Welcome for each in heard)  # once all agents greet
        connections.tick(time.monotonic())
    connections.close()
    assert is_welcomed
