"""Hosts by ssh, and networks that fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import HostError
from tests.faults.watching import wait_until

from .netns import Host

WAIT_S = 60.0
HOSTS = "cm1:2,cm2:2"
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"
FOREVER = """
import time
while True:
    {step}
"""
STEPS = {
    "idle": None,
    "Python": "time.sleep(0.01)",
    "all_reduce": "dist.all_reduce(torch.ones(4))",
}


@pytest.fixture
def mesh(machines: list[Host], runtime_dir: Path) -> Iterator[cm.Mesh]:
    with cm.start(hosts=HOSTS, lease_s=60) as mesh:
        mesh.cell("kept = rank + 5")
        yield mesh


def lost_ranks(mesh: cm.Mesh) -> set[int]:
    return mesh.rank_set.session.dead_ranks


def test_ranks_run_on_their_hosts(mesh: cm.Mesh, machines: list[Host]) -> None:
    names = mesh.run(lambda: __import__("socket").gethostname()).list
    assert names == ["cm1", "cm1", "cm2", "cm2"]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4
    assert mesh.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]).list == ["eth0"] * 4
    assert mesh.run(lambda: os.environ["MASTER_ADDR"]).list == [machines[0].address] * 4


def test_hosts_of_unequal_size_are_numbered_host_by_host(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:3") as mesh:
        names = mesh.run(lambda: (__import__("socket").gethostname(), os.environ["LOCAL_RANK"]))
        assert names.list == [("cm1", "0"), ("cm2", "0"), ("cm2", "1"), ("cm2", "2")]
        assert mesh.run(lambda: os.environ["LOCAL_WORLD_SIZE"]).list == ["1", "3", "3", "3"]
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4


def test_mesh_takes_the_name_of_one_whose_host_has_crashed(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1", name="far"):
        machines[0].kill(leaves_files=True)
    assert list(machines[0].directory.glob("run/cellmesh/far-h0"))
    with cm.start(hosts="cm1:1", name="far") as mesh:
        assert mesh.pull("rank").list == [0]


def test_host_behind_another_is_reached_by_proxy_jump(
    machines: list[Host], runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No packet of the notebook's host gets through to cm2, but for those that cm1 passes on."""
    client = machines[0].directory.parent / "ssh_config"
    config = client.read_text()
    machines[1].close_to_notebook()
    try:
        client.write_text(f"Host cm2\n    ProxyJump cm1\n{config}")
        with cm.start(hosts="cm1:1,cm2:1") as mesh:
            assert "cm2 is reached through ssh's forwarding" in capfd.readouterr().err
            assert mesh.run(lambda: __import__("socket").gethostname()).list == ["cm1", "cm2"]
            mesh.cell(REDUCE)
    finally:
        client.write_text(config)


def test_chosen_interface_comes_before_that_of_a_sites_profile(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(
        hosts="cm1:1,cm2:1",
        interface="eth0",
        launch="ssh -o BatchMode=yes {host} 'GLOO_SOCKET_IFNAME=lo {command}'",
    ) as mesh:
        assert mesh.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]).list == ["eth0"] * 2
        mesh.cell(REDUCE)


@pytest.mark.parametrize("what", STEPS)
def test_cable_that_is_back_within_the_lease_costs_nothing(
    what: str, mesh: cm.Mesh, machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    step = STEPS[what]
    run = mesh.submit_cell(FOREVER.format(step=step)) if step else None
    machines[1].cut()
    text = ""

    def is_reported(phrase: str) -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return phrase in text

    wait_until(lambda: is_reported("cm2 (ranks 2-3) is not heard"), WAIT_S, "it is reported")
    assert not lost_ranks(mesh)
    machines[1].mend()
    wait_until(lambda: is_reported("cm2 (ranks 2-3) is heard again"), WAIT_S, "it is heard again")
    if run is not None:
        assert not run.done()
        run.interrupt()
        run.wait(WAIT_S)
    assert mesh.pull("kept").list == [5, 6, 7, 8]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


@pytest.mark.parametrize("index", [0, 1])
def test_dead_host_is_started_again_or_replaced(
    index: int, machines: list[Host], runtime_dir: Path
) -> None:
    """The first host has the store."""
    lost, living = ({0, 1}, [2, 3]) if index == 0 else ({2, 3}, [0, 1])
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        for hosts, host in (("", f"cm{index + 1}"), ("cm3", "cm3")):
            machines[index].kill()
            wait_until(lambda: lost_ranks(mesh) == lost, WAIT_S, "the host is lost")
            assert set(mesh.heal(living[0], hosts=hosts).respawned) == lost
            assert {mesh.report()[rank].host for rank in lost} == {host}
            assert mesh[living].pull("kept").list == [rank + 5 for rank in living]
            mesh.cell(REDUCE)
            assert mesh.pull("float(x)").list == [6.0] * 4


def test_dead_hosts_are_started_again_as_far_as_they_can_be(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:1,cm3:1", lease_s=60, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        for host in machines[1:3]:
            host.kill()
        wait_until(lambda: lost_ranks(mesh) == {1, 2}, WAIT_S, "both hosts are lost")
        machines[2].close_ssh()
        with pytest.raises(HostError, match=r"^cm3 is lost, and no agent could be started: cm3"):
            mesh.heal()
        assert lost_ranks(mesh) == {2}
        assert [mesh.report()[rank].host for rank in (0, 1)] == ["cm1", "cm2"]
        machines[2].mend()
        assert mesh.heal(0).respawned == (2,)
        assert mesh[0].pull("kept") == 5
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 3
        for host in machines[1:3]:
            host.kill()
        wait_until(lambda: lost_ranks(mesh) == {1, 2}, WAIT_S, "both hosts are lost once more")
        assert mesh.heal(0).respawned == (1, 2)
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 3


def test_ssh_connection_that_breaks_costs_nothing(mesh: cm.Mesh, machines: list[Host]) -> None:
    connections = [each for each in psutil.Process().children() if each.name() == "ssh"]
    assert len(connections) == 2  # one a host
    for process in connections:
        process.kill()
    _, left = psutil.wait_procs(connections, timeout=WAIT_S)
    assert not left
    assert mesh.pull("kept").list == [5, 6, 7, 8]
    mesh.cell(REDUCE)
