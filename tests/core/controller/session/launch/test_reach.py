"""The way to an agent, with agents in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from cellmesh.controller.session.launch import hosts as reach
from cellmesh.controller.session.launch.hosts import (
    Reach,
    describe_detours,
    tunnel_command,
    unreached,
)
from cellmesh.wire.hosts import Host
from cellmesh.wire.ticket import Ticket

from .....support.tickets import make_ticket

OPEN, CLOSED = Host("a", "tcp://10.0.0.1:5"), Host("b", "tcp://10.0.0.2:5")
OTHER = Host("c", "tcp://10.0.0.3:5")
TICKET = make_ticket(num_ranks=3)


class Tunnel:
    """A forwarding to an agent, at an endpoint with the agent's name."""

    def __init__(self, agent: Host) -> None:
        self.endpoint, self.is_closed = f"tcp://127.0.0.1:{agent.name}", False
        MADE.append(self)

    def close(self) -> None:
        self.is_closed = True


MADE: list[Tunnel] = []


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The endpoints at which an agent answers."""
    endpoints = [OPEN.endpoint]

    def ask_at(ticket: Ticket, ways: Sequence[tuple[Host, str]], timeout_s: float) -> Any:
        return {agent: None for agent, endpoint in ways if endpoint in endpoints}

    MADE.clear()
    monkeypatch.setattr(reach, "ask_at", ask_at)
    monkeypatch.setattr(reach, "Tunnel", Tunnel)
    return endpoints


def test_agent_that_answers_is_reached_at_its_port(answering: list[str]) -> None:
    said: list[str] = []
    old = msgspec.structs.replace(OPEN, via="tcp://127.0.0.1:9")
    assert Reach(True, said.append).find(TICKET, [old]) == ([OPEN], {})
    assert (said, MADE) == ([], [])


def test_forwarding_is_the_last_way_and_is_reported(answering: list[str]) -> None:
    said: list[str] = []
    answering.append("tcp://127.0.0.1:b")
    ways = Reach(True, said.append)
    (first, second), problems = ways.find(TICKET, [OPEN, CLOSED])
    assert (first.via, second.via, problems) == ("", "tcp://127.0.0.1:b", {})
    assert said == ["b is reached through ssh's forwarding: its own port is closed from here"]
    assert describe_detours([first, second]) == said
    assert not MADE[0].is_closed
    ways.close()
    assert MADE[0].is_closed


def test_forwardings_that_lead_to_agents_outlive_one_that_leads_nowhere(
    answering: list[str],
) -> None:
    answering.append("tcp://127.0.0.1:b")
    ways = Reach(True, lambda text: None)
    found, problems = ways.find(TICKET, [CLOSED, OTHER])
    assert problems.keys() == {1}
    assert [each.is_closed for each in MADE] == [False, True]
    ways.forget(found)
    assert MADE[0].is_closed


@pytest.mark.parametrize("may_forward", [True, False])
def test_agent_that_nothing_reaches_is_an_error_that_names_its_port(
    may_forward: bool, answering: list[str]
) -> None:
    found, problems = Reach(may_forward, lambda text: None).find(TICKET, [OPEN, CLOSED])
    text = str(unreached(found[1], problems[1]))
    assert text.startswith("b: its agent runs, and cannot be reached: tcp://10.0.0.2:5 does not")
    assert "Open TCP port 5 of 10.0.0.2" in text
    assert ("; ssh does not forward to it" in text) == may_forward


def test_forwarding_has_a_connection_of_its_own() -> None:
    command = tunnel_command(CLOSED, 6000)
    options = [value for option, value in itertools.pairwise(command) if option == "-o"]
    assert "ControlPath=none" in options
    assert command[command.index("-L") + 1] == "127.0.0.1:6000:10.0.0.2:5"
    assert command[-2:] == ["b", "cat"]
