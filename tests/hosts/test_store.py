"""The c10d store is made again wherever its hosts are lost, or leave the mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import HostError
from tests.faults.watching import wait_until

from .netns import Host

WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x)"


def dead_ranks(mesh: cm.Mesh) -> set[int]:
    return mesh.rank_set.session.dead_ranks


def test_store_is_made_again_when_two_hosts_are_lost_at_once(
    machines: list[Host], runtime_dir: Path
) -> None:
    hosts = "cm1:1,cm2:1,cm3:1,cm4:1"
    with cm.start(hosts=hosts, lease_s=20, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        for machine in machines[:2]:
            machine.cut()
        wait_until(lambda: dead_ranks(mesh) == {0, 1}, WAIT_S, "both are lost")
        assert mesh[[2, 3]].pull("kept").list == [7, 8]
        for machine in machines[:2]:
            machine.mend()
            machine.kill()
        assert mesh.heal().respawned == (0, 1)
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [10.0] * 4
        assert mesh[[2, 3]].pull("kept").list == [7, 8]


def test_store_on_a_host_that_leaves_is_made_again(machines: list[Host], runtime_dir: Path) -> None:
    with cm.start(hosts="cm1:1,cm2:2", lease_s=20, host_lease_s=2) as mesh:
        machines[0].kill()
        wait_until(lambda: dead_ranks(mesh) == {0}, WAIT_S, "cm1 is lost")
        assert mesh.heal().respawned == (0,)  # the store is on cm2 now
        mesh.cell(f"kept = rank + 5; {REDUCE}")
        mesh.resize(1)
        mesh.cell(REDUCE)
        assert mesh.pull("kept").list == [5]
        mesh.resize(hosts="cm3:1")
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 2


def test_restart_is_refused_while_a_host_is_not_heard(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:1", lease_s=20, host_lease_s=4) as mesh:
        mesh.cell("kept = rank + 5")
        machines[1].cut()
        infos = mesh.report()  # which waits until the host is reported
        assert [info.is_heard for info in infos] == [True, False]
        with pytest.raises(HostError, match=r"cm2 is not heard: .*dist_heal.*dist_resize 1"):
            mesh.restart()
        wait_until(lambda: dead_ranks(mesh) == {1}, WAIT_S, "cm2 is lost")
        with pytest.raises(HostError, match=r"cm2 is lost: .*dist_heal.*dist_resize 1"):
            mesh.restart()
        assert mesh[0].pull("kept") == 5
        machines[1].mend()
        machines[1].kill()
        mesh.heal()
        mesh.restart()
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 2


def test_restart_goes_on_without_a_silent_host_that_a_resize_left_out(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:1", lease_s=20, host_lease_s=20) as mesh:
        machines[1].cut()
        assert [info.is_heard for info in mesh.report()] == [True, False]
        mesh.resize(1)
        mesh.restart()
        assert mesh.pull("rank").list == [0]
        mesh.resize(hosts="cm3:1")
        mesh.cell(REDUCE)
        assert [(info.host, info.is_heard) for info in mesh.report()] == [
            ("cm1", True),
            ("cm3", True),
        ]
        machines[1].mend()
        wait_until(lambda: not machines[1].meshes(), WAIT_S, "the host that left has ended")
