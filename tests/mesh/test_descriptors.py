"""Ranks without a free descriptor: what still works, and that a heal ends no process."""

from __future__ import annotations

import pytest

import cellmesh as cm
from cellmesh.errors import HostError, RanksInterrupted
from cellmesh.workers.groups import group_factory

from .conftest import Recorder
from .test_faults import wait_until_busy

WAIT_S = 60.0
HOARD = """
import os, resource, time
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
hoard = []
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        while True:
            hoard.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
"""
LET_GO = "[os.close(hoard.pop()) for _ in range(len(hoard))]"
MEET = "t = torch.ones(1); dist.all_reduce(t)"


def test_a_heal_without_descriptors_fails_and_says_what_to_do(
    own_mesh: cm.Mesh, recorder: Recorder
) -> None:
    mesh = own_mesh
    mesh.cell("kept = rank; group = dist.new_group([0, 1])")
    pids = [info.pid for info in mesh.report()]
    mesh.cell(HOARD)
    assert mesh.pull("len(hoard) > 50").list == [False, True]

    mesh.submit_cell("print('still heard')", sink=recorder).result(WAIT_S)
    assert ((0, 1), "still heard") in recorder.lines()
    run = mesh.submit_cell("time.sleep(1000)")
    wait_until_busy(mesh, run)
    run.interrupt()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    with pytest.raises(cm.RankFailure, match="rank 0 raised ValueError"):  # rank 1 is released
        mesh.cell(f"if rank == 0:\n    raise ValueError('boom')\n{MEET}")

    words = r"rank 1: \d+ of 200 descriptors are free, and .* needs \d+: close .* `ulimit -n`"
    with pytest.raises(HostError, match=words):
        mesh.heal()
    assert [info.pid for info in mesh.report()] == pids
    mesh.cell(LET_GO)
    mesh.heal()
    mesh.cell(f"{MEET}; dist.all_reduce(t, group=group)")
    assert mesh.pull("(kept, t.item())").list == [(0, 4.0), (1, 4.0)]
    assert [info.pid for info in mesh.report()] == pids


def test_a_group_that_cannot_be_connected_is_refused_and_ends_no_rank(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(HOARD)
    pids = [info.pid for info in own_mesh.report()]
    with pytest.raises(cm.RankFailure, match="descriptors are free"):
        own_mesh.cell("group = dist.new_group([0, 1])")
    own_mesh.cell(LET_GO)
    own_mesh.heal()
    own_mesh.cell(MEET)
    assert [info.pid for info in own_mesh.report()] == pids


def test_descriptors_of_a_group_are_counted_amply(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(
        "import os; before = len(os.listdir('/proc/self/fd')); group = dist.new_group([0, 1])"
    )
    opened = own_mesh.pull("len(os.listdir('/proc/self/fd')) - before").list
    assert all(0 < num <= group_factory.A_GROUP + 2 for num in opened)


STANDARD = "[os.path.realpath(f'/proc/self/fd/{number}') for number in range(3)]"


def test_a_group_takes_no_standard_descriptor_that_user_code_has_closed(own_mesh: cm.Mesh) -> None:
    own_mesh.cell("import os, subprocess\nfor number in range(3):\n    os.close(number)")
    own_mesh.cell(f"group = dist.new_group([0, 1]); {MEET}; dist.all_reduce(t, group=group)")
    assert own_mesh.pull(STANDARD).list == [["/dev/null"] * 3] * 2
    own_mesh.cell("subprocess.run(['sh', '-c', 'cat; echo noise; echo noise >&2'], check=True)")
    own_mesh.cell("[os.close(number) for number in range(3)]")
    with pytest.raises(cm.RankFailure, match="rank 0 raised ValueError"):
        own_mesh.cell(f"if rank == 0:\n    raise ValueError('boom')\n{MEET}")
    own_mesh.cell("dist.all_reduce(t, group=group)")
    assert own_mesh.pull(STANDARD).list == [["/dev/null"] * 3] * 2
