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
from cellmesh.controller.session.launch.reach import (
    Reach,
    describe_detours,
    describe_way,
    tunnel_command,
)
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
    monkeypatch.setattr(reach, "_DIALED_S", 3.0)
    return free_endpoint()


@pytest.fixture
def free() -> str:
    """A port of this host for an agent to connect to."""
    return free_endpoint()


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def agent_at(endpoint: str) -> AgentAddress:
    return AgentAddress("a", endpoint, AGENT.public, 0, 2)


def refuse(index: int, endpoint: str) -> None:
    raise HostError("no route")


def test_agent_that_answers_is_reached_at_its_port(endpoint: str) -> None:
    said: list[str] = []
    (found,) = Reach(SECRET, "lo", True, said.append).find([agent_at(endpoint)], refuse)
    assert (found.way, found.reached_at, said) == ("agent", endpoint, [])


def test_agent_connects_where_its_port_is_closed(nowhere: str) -> None:
    asked: list[str] = []

    def dial(index: int, endpoint: str) -> None:
        asked.append(endpoint)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        socket.create_connection((host, int(port))).close()  # somebody listens

    said: list[str] = []
    ways = Reach(SECRET, "127.0.0.1", True, said.append)
    (found,) = ways.find([agent_at(nowhere)], dial)
    assert (found.way, [found.via], said) == ("notebook", asked, [describe_way(found)])


def test_forwarding_is_the_last_way(endpoint: str, nowhere: str) -> None:
    forwarding = Forwarding(endpoint)
    ways = Reach(SECRET, "127.0.0.1", True, lambda text: None, lambda agent: forwarding)
    (found,) = ways.find([agent_at(nowhere)], refuse)
    assert (found.way, found.reached_at, found.endpoint) == ("ssh", endpoint, nowhere)
    assert not forwarding.is_closed
    ways.close()
    assert forwarding.is_closed


def test_forwarding_has_a_connection_of_its_own() -> None:
    command = tunnel_command(agent_at("tcp://192.0.2.9:5000"), 6000)
    options = [value for option, value in itertools.pairwise(command) if option == "-o"]
    assert "ControlPath=none" in options
    assert command[command.index("-L") + 1] == "127.0.0.1:6000:192.0.2.9:5000"
    assert command[-2:] == ["a", "cat"]


def test_agent_that_nothing_reaches_is_an_error_that_names_each_way(nowhere: str) -> None:
    forwarding = Forwarding(nowhere)
    ways = Reach(SECRET, "127.0.0.1", True, lambda text: None, lambda agent: forwarding)
    with pytest.raises(HostError, match=r"a: .*does not answer; .*no route.*; ssh does not .*"):
        ways.find([agent_at(nowhere)], refuse)
    assert forwarding.is_closed


def test_forwardings_of_others_outlive_an_agent_that_nothing_reaches(
    endpoint: str, nowhere: str
) -> None:
    first, second = Forwarding(endpoint), Forwarding(endpoint)
    left = [first, second]
    ways = Reach(SECRET, "127.0.0.1", True, lambda text: None, lambda agent: left.pop(0))
    found = ways.find([agent_at(nowhere)], refuse)
    left += [Forwarding(nowhere)]
    with pytest.raises(HostError, match="cannot be reached"):
        ways.find([agent_at(nowhere)] * 2, refuse)
    assert (first.is_closed, second.is_closed) == (False, True)
    ways.forget(found)
    assert first.is_closed


def test_lost_agent_does_not_keep_others_from_being_attached(endpoint: str, nowhere: str) -> None:
    ways = Reach(SECRET, "", False, lambda text: None)
    found, unheard = ways.find_again([agent_at(endpoint), agent_at(nowhere)])
    assert ([agent.reached_at for agent in found], unheard) == ([endpoint, nowhere], (1,))
    with pytest.raises(HostError, match="cannot be reached"):
        ways.find_again([agent_at(nowhere)])


def test_agent_that_was_asked_before_is_reached_only_if_it_connects_again(
    nowhere: str, free: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "own_addresses", lambda: ["127.0.0.1"])
    context: zmq.Context[transport.Socket] = zmq.Context()
    router = transport.bind_router(context, "tcp://127.0.0.1:*", AGENT)
    try:
        router.connect(free)
        asked = msgspec.structs.replace(agent_at(nowhere), way="notebook", via=free)
        dead = msgspec.structs.replace(asked, via=nowhere, public_key=new_keys().public)
        said: list[str] = []
        ways = Reach(SECRET, "", False, said.append)
        assert ways.find_again([asked, dead]) == ([asked, dead], (1,))
        assert said == [describe_way(asked)]
    finally:
        router.close(linger=0)
        context.term()


def test_agent_does_not_connect_to_another_host_than_before(nowhere: str) -> None:
    ways = Reach(SECRET, "", False, lambda text: None)
    elsewhere = msgspec.structs.replace(agent_at(nowhere), way="notebook", via="tcp://192.0.2.9:5")
    with pytest.raises(HostError, match="the notebook that has started it"):
        ways.find_again([elsewhere])


def test_ways_to_several_agents_are_searched_at_once(nowhere: str) -> None:
    together = threading.Barrier(3)

    def dial(index: int, endpoint: str) -> None:
        together.wait(20)  # breaks if one is asked after the other

    ways = Reach(SECRET, "127.0.0.1", True, lambda text: None)
    found = ways.find([agent_at(nowhere)] * 3, dial)
    assert [agent.way for agent in found] == ["notebook"] * 3
    assert len({agent.via for agent in found}) == 3


def test_ways_are_said_of_hosts_that_are_not_reached_straight(nowhere: str) -> None:
    agent = agent_at(nowhere)
    dialled = msgspec.structs.replace(agent, host="b", way="notebook", via="tcp://192.0.2.9:5")
    forwarded = msgspec.structs.replace(agent, host="c", way="ssh", via="tcp://127.0.0.1:5")
    assert describe_detours([agent, dialled, forwarded]) == [
        "b connects to this host (tcp://192.0.2.9:5): its own port is closed from here",
        "c is reached through ssh's forwarding: no other way is open",
    ]
