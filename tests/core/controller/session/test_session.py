"""The controller's session, the loop of its link, and its connection to an agent."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from cellmesh.controller.core.core import Change, Core
from cellmesh.controller.core.mesh_state import HostLost
from cellmesh.controller.session.connection import Connection
from cellmesh.controller.session.launch.local import LocalAgent
from cellmesh.controller.session.life import Life
from cellmesh.controller.session.link import Link, warn
from cellmesh.controller.session.runs import Runs
from cellmesh.controller.session.session import Session
from cellmesh.errors import MeshUsageError, NoMeshError
from cellmesh.wire import transport
from cellmesh.wire.attach import Hello, RunInfo, Welcome
from cellmesh.wire.codec import at_agent_from_controller
from cellmesh.wire.curve import KeyPair, new_keys
from cellmesh.wire.host import Process
from cellmesh.wire.hosts import Host
from cellmesh.wire.messages import StartFailed
from cellmesh.wire.status import ReadHost
from cellmesh.wire.ticket import new_key

from ....support.tickets import make_ticket

WAIT_S = 20.0
WELCOME = Welcome(1, os.getpid(), "host", next_run=8, runs=(RunInfo(7, (0, 1), "cell 2"),))
TICKET, NO_AGENT = make_ticket(), Process(0, 0)


def hear_welcome(link: Link) -> None:
    """The link's thread, if the agent's first message is there as soon as it runs."""
    try:
        link._owner.note(Change("starting", WELCOME))
    finally:
        os.close(link._wake)
        os.close(link._agent)


@pytest.mark.parametrize(("shell", "heal"), [(None, "cellmesh heal dev"), (object(), "%dist_heal")])
def test_the_loss_of_a_host_is_told_with_the_next_step_of_this_process(
    shell: object, heal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cellmesh.controller.session.link.own_shell", lambda: shell)
    warn(HostLost("b", (2, 3), "it did not answer").describe(), "dev")
    assert f"`{heal}` takes the host back" in capsys.readouterr().err


def test_an_agent_may_answer_as_soon_as_the_link_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "_serve", hear_welcome)
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    session = Session(
        TICKET, LocalAgent(TICKET, NO_AGENT), os.pidfd_open(os.getpid()), is_found=True
    )
    session._at_exit.forget()
    (run,) = session.runs.all()
    assert (run.number, run.title) == (7, "cell 2")


def test_connection_that_cannot_be_made_ends_the_mesh_with_the_cause(tmp_path: Path) -> None:
    endpoints = ("tcp://192.0.2.9:5", "tcp://no-port")
    agents = [Host(at, at, new_keys().public, rank, 1) for rank, at in enumerate(endpoints)]
    known: dict[str, Any] = {"curve_secret": new_keys().secret, "directory": str(tmp_path)}
    ticket = make_ticket(agents=tuple(agents), **known)
    session = Session(
        ticket, LocalAgent(TICKET, NO_AGENT), os.pidfd_open(os.getpid()), is_found=True
    )
    with pytest.raises(NoMeshError, match="cannot use tcp://no-port: Invalid argument"):
        session.wait_until_attached(60.0)


# ---- the link's loop: what wakes it, and which callers may wait for it


class Owner(Mock):
    """A session whose agent is silent."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.reads, self.writes = os.pipe()  # of the agents' sockets
        self.ready: list[int] = []
        self.is_closed = threading.Event()
        self.connect = lambda: self
        self.descriptors = lambda: (self.reads,)
        self.note_ready = lambda number: self.ready.append(len(os.read(number, 1)))
        self.hear = lambda now: []
        self.is_readable = lambda: False
        self.deadline = lambda: None
        self.close = lambda: (os.close(self.reads), os.close(self.writes))
        self.note_closed = self.is_closed.set


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_a_start_without_file_descriptors_says_how_to_get_more() -> None:
    life = Life("mesh", 8, None, None)
    problem = "cannot fork 8 ranks: [Errno 24] Too many open files"
    life.note(Change("stopping", StartFailed("host", problem)))
    assert str(life.explain_start(60, "")).startswith(f"{problem}. `ulimit -n 4096` in the shell")


def start_link(owner: Owner) -> tuple[Link, int]:
    """A link, and the end of a pipe that is open as long as the agent's process lives."""
    reads, writes = os.pipe()
    link = Link(owner, Core(1), reads)
    runs: Any = Runs(owner, link, 1)  # type: ignore[arg-type]
    link.start(runs)
    return link, writes


@pytest.fixture
def link(owner: Owner) -> Iterator[Link]:
    link, writes = start_link(owner)
    yield link
    os.close(writes)  # ends the loop, unless `close` has
    link.close()
    assert owner.is_closed.wait(WAIT_S)


def in_loop(link: Link, call: Any) -> Any:
    """The result of a function that the loop calls."""
    found = queue.Queue[Any]()

    def act(core: Core, now: float) -> tuple[()]:
        found.put(call())
        return ()

    link.post(act)
    return found.get(timeout=WAIT_S)


def test_commands_and_messages_wake_the_loop_one_by_one(link: Link, owner: Owner) -> None:
    for number in range(1, 4):
        os.write(owner.writes, b"x")
        while len(owner.ready) < number:
            in_loop(link, lambda: None)
    assert in_loop(link, link.is_in_loop)
    assert not link.is_in_loop()


def refused(link: Link) -> str:
    try:
        link.check_may_wait()
    except MeshUsageError as error:
        return str(error)
    return ""


def test_only_the_loops_thread_may_not_wait_for_it_and_only_until_it_ends(link: Link) -> None:
    assert "a callback" in in_loop(link, lambda: refused(link))
    assert not refused(link)
    link.close()
    link.close()
    assert not refused(link)
    with pytest.raises(NoMeshError, match="the mesh has ended"):
        link.post(lambda core, now: ())
    assert link.ask(lambda core, now: core.ask_agent(ReadHost)).result(WAIT_S) is None


def test_the_end_of_the_agents_process_ends_the_loop_and_open_questions(owner: Owner) -> None:
    link, writes = start_link(owner)
    reply = link.ask(lambda core, now: core.ask_agent(ReadHost))
    os.close(writes)
    assert reply.result(WAIT_S) is None
    assert owner.is_closed.wait(WAIT_S)


def test_a_forked_process_is_refused(link: Link) -> None:
    parent = os.getpid()
    child = os.fork()
    if not child:
        os._exit(0 if f"({parent})" in refused(link) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# ---- the connection to an agent on another host, with real sockets


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
    here = Connection("ipc:///tmp/cellmesh-nobody-listens", new_key(), steal=False)
    assert here.deadline() is None, "an agent of this host is waited for"
    here.close()


def connect(endpoint: str, agent: KeyPair) -> Connection:
    return Connection(endpoint, new_key(), steal=False, keys=(new_keys().secret, agent.public))


def hear_until(is_done: Callable[[], bool], connection: Connection) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline
        hear(connection)


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
