"""How long an agent waits for its controller, and actions of it that fail."""

from __future__ import annotations

import select
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from cellmesh.wire import transport
from cellmesh.wire.curve import new_keys
from cellmesh.wire.faults import Faults
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.reliable import Reliable
from cellmesh.wire.ticket import Ticket
from cellmesh.workers.agent.agent import Agent
from cellmesh.workers.agent.controller_port import ControllerPort
from cellmesh.workers.agent.events import Events
from cellmesh.workers.agent.port import Port


def test_agent_waits_for_its_controller_as_long_as_the_start_may_take(tmp_path: Path) -> None:
    controller, agent = new_keys(), new_keys()
    part = HostPart(0, 1, "a", 0, 1, controller.public, address="127.0.0.1", start_timeout_s=600.0)
    ticket = Ticket(
        name="t", key="00", directory=str(tmp_path), num_ranks=1, backend="gloo",
        mesh_dim_names=(), mesh_shape=(), preload=(), sys_path=(), cwd="/", controller_pid=1,
        created_at=0.0, host=part, curve_secret=agent.secret,
    )  # fmt: skip
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
def test_an_action_that_fails_ends_a_start_and_no_mesh(state: str, texts: list[str]) -> None:
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


def test_message_that_arrives_while_the_agent_looks_for_its_controller_is_heard(
    tmp_path: Path,
) -> None:
    """A look at a ROUTER's state takes in what its descriptor would have reported."""
    heard: list[tuple[bytes, bytes]] = []
    context: zmq.Context[transport.Socket] = zmq.Context()
    port: Any = ControllerPort.__new__(ControllerPort)
    port._socket = transport.bind_router(context, f"ipc://{tmp_path}/a")
    port._reliable, port._identity = Reliable(), b"controller"
    port._receive = lambda identity, preamble, frames: heard.append((identity, preamble))
    controller = context.socket(zmq.DEALER)
    controller.setsockopt(zmq.IDENTITY, b"controller")
    controller.connect(f"ipc://{tmp_path}/a")
    controller.send(b"first")
    assert port._socket.poll(20_000)
    port.serve()
    controller.send(b"second")
    assert select.select([port._socket.getsockopt(zmq.FD)], [], [], 20.0)[0]
    assert port._is_connected()
    if port.may_be_readable:
        port.serve()
    assert heard == [(b"controller", b"first"), (b"controller", b"second")]
    controller.close(linger=0)
    port._socket.close(linger=0)
    context.term()
