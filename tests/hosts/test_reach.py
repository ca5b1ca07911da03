"""Hosts behind firewalls: ssh forwards where a host's port is closed, and it is said."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import HostError
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.faults.watching import wait_until

from .netns import Host
from .notebook import here

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
        assert [line.split("'s")[0] for line in mesh.rank_set.session.describe_ways()] == [
            f"{name} is reached through ssh" for name in ("cm1", "cm2")
        ]
        assert "cm2 is reached through ssh's forwarding" in here("ps").stderr
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


def test_mesh_is_attached_from_another_host_and_from_the_first_again(
    closed: list[Host], machines: list[Host], tmp_path: Path
) -> None:
    mesh = cm.start(hosts="cm1:2,cm2:2", lease_s=60)
    mesh.cell("kept = rank + 5")
    ticket = mesh.rank_set.session.ticket.path
    mesh.detach()
    copy = tmp_path / "ticket.json"
    copy.write_bytes(ticket.read_bytes())
    copy.chmod(0o600)
    script = tmp_path / "attach.py"
    script.write_text(
        f"import cellmesh as cm\nmesh = cm.attach({str(copy)!r})\n"
        "print('kept', mesh.pull('kept').list, flush=True)\nmesh.detach()\n"
    )
    process = machines[2].start(sys.executable, str(script))
    assert process.wait(WAIT_S) == 0, machines[2].read_log()
    assert "kept [5, 6, 7, 8]" in machines[2].read_log()
    with cm.attach(str(ticket)) as again:
        assert are_forwarded(again) == [True, True]
        check(again)
    # The host that has left the mesh to its lease still has its own ticket of it.
    shutil.rmtree(machines[2].directory / "run/cellmesh")


def test_mesh_with_a_dead_host_is_attached_through_forwardings(closed: list[Host]) -> None:
    mesh = cm.start(hosts="cm1:2,cm2:2", lease_s=60, name="far")
    assert are_forwarded(mesh) == [True, True]
    mesh.cell("kept = rank + 5")
    mesh.detach()
    closed[1].kill()
    with cm.attach("far") as again:
        assert again.rank_set.session.dead_ranks == {2, 3}
        assert [again[rank].pull("kept") for rank in (0, 1)] == [5, 6]


def test_host_that_nothing_reaches_is_named_with_its_port(closed: list[Host]) -> None:
    """The engine is a command, so nothing says that ssh could forward."""
    command = "ssh -o BatchMode=yes {host} {command}"
    with pytest.raises(
        HostError, match=rf"cm1: .*does not answer\. Open TCP port \d+ of {closed[0].address} "
    ):
        cm.start(hosts="cm1:2,cm2:2", launch=command)
    wait_until(lambda: not any(host.meshes() for host in closed), WAIT_S, "the agents end")


def row_of(name: str) -> dict[str, Any]:
    (row,) = [row for row in json.loads(here("ps", "--json").stdout) if row["name"] == name]
    return dict(row)


def state_of(name: str) -> str:
    return str(row_of(name)["state"])


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


def test_mesh_whose_ports_are_closed_after_its_start_is_not_forgotten(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60, name="far") as mesh:
        mesh.cell("kept = rank + 5")
        for host in machines[:2]:
            host.close_ports("reject")
        assert state_of("far") == "unheard"
        assert read_ticket(runtime_root() / "far/ticket.json").agents
        check(mesh)
