"""What agents announce is checked before any of them is let go, and the way to an agent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cellmesh.controller.session.launch import hosts as hosts_module
from cellmesh.controller.session.launch.commands import HostCommands
from cellmesh.controller.session.launch.hosts import (
    HostAgents,
    Reach,
    check_hosts,
    tunnel_command,
    unreached,
)
from cellmesh.errors import HostError, MeshUsageError
from cellmesh.wire.host import Place, Versions
from cellmesh.wire.hosts import Announcement, Host, HostPart
from cellmesh.wire.ticket import Ticket, read_ticket

from .....support.tickets import make_ticket


def announced(name: str, address: str, torch: str = "2.13.0", boot: str = "") -> Announcement:
    return Announcement(
        host=Host(name, f"tcp://{address}:5", "key", 0, 1),
        place=Place(boot or name, "boot", "pids"),
        versions=Versions("1", "3.11.1", torch),
    )


def ticket_in(directory: Path, *agents: Host) -> Ticket:
    return make_ticket(directory=str(directory), num_ranks=len(agents), agents=agents)


A = Host("a", "tcp://127.0.0.1:5", "", 0, 1)


def test_hosts_that_fit_pass() -> None:
    check_hosts([announced("a", "10.0.0.1"), announced("b", "10.0.0.2", "2.13.0+cpu")], is_ssh=True)
    check_hosts([announced("a", "127.0.0.1"), announced("b", "127.0.0.1")], is_ssh=True)
    same = [announced("a", "10.0.0.1", boot="x"), announced("b", "10.0.0.1", boot="x")]
    check_hosts(same, is_ssh=False)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (("a", "10.0.0.1", "2", "x"), ("b", "10.0.0.1", "2", "x"), "a and b are one host"),
        (("a", "127.0.0.1"), ("b", "10.0.0.2"), "a is reached by the loopback"),
        (("a", "10.0.0.1", "2.12.1"), ("b", "10.0.0.2"), "a has 2.12.1, b has 2.13.0"),
    ],
    ids=["one host twice", "loopback", "versions"],
)
def test_hosts_that_do_not_fit_are_refused(a: Any, b: Any, error: str) -> None:
    with pytest.raises((HostError, MeshUsageError), match=error):
        check_hosts([announced(*a), announced(*b)], is_ssh=True)


class Starter(HostCommands):
    """Starts agents of which that of host b has no torch."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, str] = {}
        self.has_let_go = False

    def start(
        self, ticket: Ticket, parts: Sequence[HostPart], timeout_s: float, needs_all: bool = True
    ) -> list[Announcement]:
        assert not needs_all
        self.left = {part.index: part.name for part in parts}
        return [
            Announcement("no torch") if name == "b" else announced(name, f"new-{name}")
            for name in self.left.values()
        ]

    def drop(self, index: int) -> None:
        del self.left[index]

    def let_go(self) -> None:
        self.has_let_go = True


def test_lost_hosts_are_started_again_as_far_as_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host a is not lost, b has no torch, c is not reached, d starts, and f replaces e."""
    old = [Host(name, f"tcp://{name}:5", "", i, 1) for i, name in enumerate("abcde")]
    ticket = ticket_in(tmp_path, *old)
    agents = HostAgents(ticket)
    agents._starter = starter = Starter()

    def find(ticket: Ticket, found: list[Host]) -> tuple[list[Host], dict[int, str]]:
        return found, {0: "not reached"} if found[0].name == "c" else {}

    monkeypatch.setattr(agents._reach, "find", find)
    failed = agents.start_again({1: "b", 2: "c", 3: "d", 4: "f"})
    assert failed.keys() == {1, 2}
    assert str(failed[1]) == "no torch"
    assert "cannot be reached: not reached" in str(failed[2])
    assert (starter.left, starter.has_let_go) == ({3: "d", 4: "f"}, True)
    now = agents.ticket
    assert [agent.endpoint for agent in now.agents] == [
        *("tcp://a:5", "tcp://b:5", "tcp://c:5", "tcp://new-d:5", "tcp://new-f:5")
    ]
    assert (now.replaced, now.agents_revision) == ((old[4],), 1)
    assert read_ticket(tmp_path / "ticket.json").agents == now.agents


def test_a_forwarding_to_an_agent_has_a_connection_of_its_own() -> None:
    command = tunnel_command(Host("b", "tcp://10.0.0.2:5"), 6000)
    options = [value for option, value in itertools.pairwise(command) if option == "-o"]
    assert "ControlPath=none" in options
    assert command[command.index("-L") + 1] == "127.0.0.1:6000:10.0.0.2:5"
    assert command[-2:] == ["b", "cat"]


def test_forwarding_is_the_last_way_to_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [Host(name, f"tcp://10.0.0.{at}:5") for at, name in enumerate("abc", 1)]
    answering = (agents[0].endpoint, "tcp://127.0.0.1:b")
    made: dict[str, Mock] = {}

    def ask_at(ticket: Ticket, ways: Sequence[tuple[Host, str]], timeout_s: float) -> Any:
        return {agent: None for agent, endpoint in ways if endpoint in answering}

    def forward(agent: Host) -> Mock:
        return made.setdefault(agent.name, Mock(endpoint=f"tcp://127.0.0.1:{agent.name}"))

    monkeypatch.setattr(hosts_module, "ask_at", ask_at)
    monkeypatch.setattr(hosts_module, "Tunnel", forward)
    reports: list[str] = []
    found, problems = Reach(True, reports.append).find(make_ticket(num_ranks=3), agents)
    assert [agent.via for agent in found] == ["", "tcp://127.0.0.1:b", ""]
    assert reports == ["b is reached through ssh's forwarding: its own port is closed from here"]
    assert {name: tunnel.close.called for name, tunnel in made.items()} == {"b": False, "c": True}
    text = str(unreached(found[2], problems[2]))
    assert text.startswith("c: its agent runs, and cannot be reached: tcp://10.0.0.3:5 does not")
    assert "Open TCP port 5 of 10.0.0.3" in text
    assert Reach(False, reports.append).find(make_ticket(), agents[:1]) == (agents[:1], {})
