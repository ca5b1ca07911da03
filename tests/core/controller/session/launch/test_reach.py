"""The way to an agent, with agents in memory."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from cellmesh.controller.session.launch import reach
from cellmesh.controller.session.launch.reach import Reach, describe_detours, tunnel_command
from cellmesh.errors import HostError
from cellmesh.wire import transport
from cellmesh.wire.curve import new_keys
from cellmesh.wire.hosts import AgentAddress

SECRET, AGENT = new_keys().secret, new_keys()


class Forwarding:
    """Leads to an agent, or nowhere."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Where an agent listens."""
    context: zmq.Context[transport.Socket] = zmq.Context()
    router = transport.bind_router(context, "tcp://127.0.0.1:*", AGENT)
    yield router.getsockopt_string(zmq.LAST_ENDPOINT)
    router.close(linger=0)
    context.term()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nobody listens; nothing is waited for long there."""
    monkeypatch.setattr(reach, "_PROBE_S", 0.3)
    monkeypatch.setattr(reach, "_TUNNEL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def agent_at(endpoint: str) -> AgentAddress:
    return AgentAddress("a", endpoint, AGENT.public, 0, 2)


def test_agent_that_answers_is_reached_at_its_port(endpoint: str) -> None:
    said: list[str] = []
    (found,) = Reach(SECRET, True, said.append).find([agent_at(endpoint)])
    assert (found.via, found.reached_at, said) == ("", endpoint, [])


def test_forwarding_is_the_last_way(endpoint: str, nowhere: str) -> None:
    forwarding = Forwarding(endpoint)
    ways = Reach(SECRET, True, lambda text: None, lambda agent: forwarding)
    (found,) = ways.find([agent_at(nowhere)])
    assert (found.via, found.reached_at, found.endpoint) == (endpoint, endpoint, nowhere)
    assert not forwarding.is_closed
    ways.close()
    assert forwarding.is_closed


def test_forwarding_has_a_connection_of_its_own() -> None:
    command = tunnel_command(agent_at("tcp://192.0.2.9:5000"), 6000)
    options = [value for option, value in itertools.pairwise(command) if option == "-o"]
    assert "ControlPath=none" in options
    assert command[command.index("-L") + 1] == "127.0.0.1:6000:192.0.2.9:5000"
    assert command[-2:] == ["a", "cat"]


def test_agent_that_nothing_reaches_is_an_error_that_names_its_port(nowhere: str) -> None:
    forwarding = Forwarding(nowhere)
    ways = Reach(SECRET, True, lambda text: None, lambda agent: forwarding)
    port = nowhere.rpartition(":")[2]
    with pytest.raises(HostError, match=f"a: .*; ssh does not .*Open TCP port {port} of 127.0.0.1"):
        ways.find([agent_at(nowhere)])
    assert forwarding.is_closed


def test_agent_that_ssh_has_not_started_is_not_reached_by_its_forwarding(nowhere: str) -> None:
    ways = Reach(SECRET, False, lambda text: None, forward=Forwarding)  # type: ignore[arg-type]
    with pytest.raises(HostError) as caught:
        ways.find([agent_at(nowhere)])
    assert "ssh" not in str(caught.value)


def test_forwardings_of_others_outlive_an_agent_that_nothing_reaches(
    endpoint: str, nowhere: str
) -> None:
    first, second = Forwarding(endpoint), Forwarding(endpoint)
    left = [first, second]
    ways = Reach(SECRET, True, lambda text: None, lambda agent: left.pop(0))
    found = ways.find([agent_at(nowhere)])
    left += [Forwarding(nowhere)]
    with pytest.raises(HostError, match="cannot be reached"):
        ways.find([agent_at(nowhere)] * 2)
    assert (first.is_closed, second.is_closed) == (False, True)
    ways.forget(found)
    assert first.is_closed


def test_lost_agent_does_not_keep_others_from_being_attached(endpoint: str, nowhere: str) -> None:
    ways = Reach(SECRET, False, lambda text: None)
    found, unheard = ways.find_again([agent_at(endpoint), agent_at(nowhere)])
    assert ([agent.reached_at for agent in found], unheard) == ([endpoint, nowhere], (1,))
    with pytest.raises(HostError, match="cannot be reached"):
        ways.find_again([agent_at(nowhere)])


def test_ways_to_several_agents_are_searched_at_once(endpoint: str, nowhere: str) -> None:
    together = threading.Barrier(3)

    def forward(agent: AgentAddress) -> Forwarding:
        together.wait(20)  # breaks if one is searched after the other
        return Forwarding(endpoint)

    ways = Reach(SECRET, True, lambda text: None, forward)
    found = ways.find([agent_at(nowhere)] * 3)
    assert [agent.via for agent in found] == [endpoint] * 3


def test_ways_are_said_of_hosts_that_are_not_reached_straight(nowhere: str) -> None:
    agent = agent_at(nowhere)
    forwarded = msgspec.structs.replace(agent, host="c", via="tcp://127.0.0.1:5")
    assert describe_detours([agent, forwarded]) == [
        "c is reached through ssh's forwarding: its own port is closed from here"
    ]
