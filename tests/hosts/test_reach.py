"""Hosts behind firewalls: the way that is open is taken, and said."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import HostError
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.faults.watching import wait_until

from .netns import NOTEBOOK, Host
from .notebook import here

WAIT_S = 60.0
LEASE_S = 3.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"


@pytest.fixture
def closed(machines: list[Host], runtime_dir: Path) -> list[Host]:
    """Two hosts whose ports are closed for the notebook's host."""
    for host in machines[:2]:
        host.close_ports()
    return machines[:2]


def ways(mesh: cm.Mesh) -> list[str]:
    return [agent.way for agent in mesh.rank_set.session._ticket.agents]


def check(mesh: cm.Mesh) -> None:
    assert mesh.pull("kept").list == [5, 6, 7, 8]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def tunnels() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "-L" in each.cmdline()]


def test_agents_connect_to_the_notebook_where_their_ports_are_closed(
    closed: list[Host], machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60, address=NOTEBOOK) as mesh:
        assert ways(mesh) == ["notebook", "notebook"]
        assert "cm2 connects to this host" in capfd.readouterr().err
        assert [line.split(" (")[0] for line in mesh.rank_set.session.describe_ways()] == [
            f"{name} connects to this host" for name in ("cm1", "cm2")
        ]
        assert "cm2 connects to this host" in here("ps").stderr
        mesh.cell("kept = rank + 5")
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


def test_mesh_is_attached_from_another_host_and_from_the_first_again(
    closed: list[Host], machines: list[Host], tmp_path: Path
) -> None:
    mesh = cm.start(hosts="cm1:2,cm2:2", lease_s=60, address=NOTEBOOK)
    mesh.cell("kept = rank + 5")
    ticket = mesh.rank_set.session._ticket.path
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
        assert ways(again) == ["notebook", "notebook"]
        check(again)
    # The host that has left the mesh to its lease still has its own ticket of it.
    shutil.rmtree(machines[2].directory / "run/cellmesh")


def test_mesh_with_a_dead_host_is_attached_where_agents_connect_to_the_notebook(
    closed: list[Host],
) -> None:
    command = "ssh -o BatchMode=yes {host} {command}"
    mesh = cm.start(hosts="cm1:2,cm2:2", launch=command, lease_s=60, address=NOTEBOOK, name="far")
    assert ways(mesh) == ["notebook", "notebook"]
    mesh.cell("kept = rank + 5")
    mesh.detach()
    closed[1].kill()
    with cm.attach("far") as again:
        assert again.rank_set.session.dead_ranks == {2, 3}
        assert [again[rank].pull("kept") for rank in (0, 1)] == [5, 6]


def test_ssh_forwards_where_nothing_else_is_open(
    closed: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    for host in closed:
        host.close_way_out()
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60, address=NOTEBOOK) as mesh:
        assert ways(mesh) == ["ssh", "ssh"]
        assert "cm2 is reached through ssh's forwarding" in capfd.readouterr().err
        mesh.cell("kept = rank + 5")
        check(mesh)
        broken = tunnels()
        assert len(broken) == 2
        for process in broken:
            process.kill()
        check(mesh)
    wait_until(lambda: not tunnels(), WAIT_S, "no forwarding is left")


def test_host_that_nothing_reaches_is_named_with_every_way(closed: list[Host]) -> None:
    for host in closed:
        host.close_way_out()
    command = "ssh -o BatchMode=yes {host} {command}"
    with pytest.raises(
        HostError, match=r"cm1: .*does not answer; .*cannot connect.*; ssh does not"
    ):
        cm.start(hosts="cm1:2,cm2:2", launch=command, address=NOTEBOOK)


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
    mesh = cm.start(hosts="cm1:2,cm2:2", lease_s=60, address=NOTEBOOK, name="far")
    assert ways(mesh) == ["notebook", "notebook"]
    mesh.cell("kept = rank + 5")
    assert state_of("far") == "running"
    stopped = here("stop", "far")
    assert "may live on" in stopped.stderr
    assert read_ticket(runtime_root() / "far/ticket.json").agents
    mesh.detach()
    assert state_of("far") == "detached"
    again = cm.attach("far")
    assert ways(again) == ["notebook", "notebook"]
    check(again)
    again.detach()
    assert here("stop", "far").stdout.startswith("stopped far")
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


def test_stranger_at_the_notebooks_port_is_counted_and_no_host_is_lost(
    closed: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    with cm.start(
        hosts="cm1:2,cm2:2", lease_s=60, address=NOTEBOOK, name="far", host_lease_s=LEASE_S
    ) as mesh:
        mesh.cell("kept = rank + 5; import time")
        for agent in mesh.rank_set.session._ticket.agents:
            address, _, port = agent.via.removeprefix("tcp://").rpartition(":")
            socket.create_connection((address, int(port))).close()
        wait_until(lambda: row_of("far")["num_refused"] == 2, WAIT_S, "both are counted")
        mesh.cell(f"time.sleep({LEASE_S} + 1)")
        check(mesh)
        assert "not heard" not in capfd.readouterr().err
