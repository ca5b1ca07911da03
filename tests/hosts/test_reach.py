"""Hosts behind firewalls: ssh forwards where a host's port is closed, and it is said."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import HostError
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.faults.watching import wait_until

from .netns import Host
from .notebook import here

FORKS_AGENTS = True
WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"


@pytest.fixture
def closed(machines: list[Host], runtime_dir: Path) -> list[Host]:
    """Two hosts whose ports are closed for the notebook's host."""
    for host in machines[:2]:
        host.close_ports()
    return machines[:2]


def are_forwarded(mesh: cm.Mesh) -> list[bool]:
    return [bool(agent.via) for agent in mesh.rank_set.session.ticket.agents]


def check(mesh: cm.Mesh) -> None:
    assert mesh.pull("kept").list == [5, 6, 7, 8]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def tunnels() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "-L" in each.cmdline()]


def test_ssh_forwards_where_the_ports_of_hosts_are_closed(
    closed: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60) as mesh:
        assert are_forwarded(mesh) == [True, True]
        assert "cm2 is reached through ssh's forwarding" in capfd.readouterr().err
        mesh.cell("kept = rank + 5")
        check(mesh)
        broken = tunnels()
        assert len(broken) == 2
        for process in broken:
            process.kill()
        check(mesh)
        closed[1].cut()
        text = ""

        def is_reported(phrase: str) -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return phrase in text

        wait_until(lambda: is_reported("cm2 (ranks 2-3) is not heard"), WAIT_S, "it is reported")
        closed[1].inside("ip", "link", "set", "eth0", "up")
        wait_until(lambda: is_reported("is heard again"), WAIT_S, "it is heard again")
        check(mesh)
    wait_until(lambda: not tunnels(), WAIT_S, "no forwarding is left")


def test_host_that_nothing_reaches_is_named_with_its_port(closed: list[Host]) -> None:
    """The engine is a command, so nothing says that ssh could forward."""
    command = "ssh -o BatchMode=yes {host} {command}"
    with pytest.raises(
        HostError, match=rf"cm1: .*does not answer\. Open TCP port \d+ of {closed[0].address} "
    ):
        cm.start(hosts="cm1:2,cm2:2", launch=command)
    wait_until(lambda: not any(host.meshes() for host in closed), WAIT_S, "the agents end")


def state_of(name: str) -> str:
    (row,) = [row for row in json.loads(here("ps", "--json").stdout) if row["name"] == name]
    return str(row["state"])


def test_mesh_behind_a_firewall_that_rejects_is_neither_forgotten_nor_lost(
    machines: list[Host], runtime_dir: Path
) -> None:
    for host in machines[:2]:
        host.close_ports("reject")
    mesh = cm.start(hosts="cm1:2,cm2:2", lease_s=60, name="far")
    assert are_forwarded(mesh) == [True, True]
    mesh.cell("kept = rank + 5")
    assert state_of("far") == "running"
    mesh.detach()
    assert state_of("far") == "unheard"  # the forwarding has ended with the notebook's session
    assert "may live on" in here("stop", "far").stderr
    assert read_ticket(runtime_root() / "far/ticket.json").agents
    with cm.attach("far") as again:
        assert are_forwarded(again) == [True, True]
        check(again)
    wait_until(lambda: not any(host.meshes() for host in machines[:2]), WAIT_S, "the agents end")
    assert not (runtime_root() / "far").exists()
