"""Meshes that get another number of ranks between cells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import HostError, MeshUsageError, RankFailure
from cellmesh.wire.ticket import find_tickets
from tests.conftest import check_nothing_left, own_runtime_dir
from tests.support.lent_agent import ENGINE

WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"
MODEL = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(8, 8))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_runtime_dir() as directory:
        yield directory
        check_nothing_left(directory)


def check_reduces(mesh: cm.Mesh) -> None:
    size = len(mesh)
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [size * (size - 1) / 2] * size


def test_ranks_that_stay_keep_process_and_names(directory: Path) -> None:
    with cm.start(2) as mesh:
        mesh.cell("kept = rank + 5")
        pids = [info.pid for info in mesh.report()]
        assert mesh.resize(4, mesh="dp=2,tp=2").respawned == (2, 3)
        assert [info.pid for info in mesh.report()][:2] == pids
        assert mesh[[0, 1]].pull("kept").list == [5, 6]
        assert mesh.pull("world_size").list == [4] * 4 == mesh.pull("mesh.size()").list
        assert mesh.run(lambda: os.environ["LOCAL_WORLD_SIZE"]).list == ["4"] * 4
        assert mesh.pull("mesh['tp'].get_local_rank()").list == [0, 1, 0, 1]
        check_reduces(mesh)
        mesh.cell("g = dist.new_group([0, 3]); y = torch.ones(1)")
        mesh[3].submit_cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait()
        assert mesh.heal(0).respawned == (3,)
        mesh.cell("if rank in (0, 3): dist.all_reduce(y, group=g)")
        assert mesh[[0, 3]].pull("float(y)").list == [2.0, 2.0]
        assert mesh.resize(1, mesh="dp=1").respawned == ()
        assert mesh.pull("kept").list == [5]
        assert [info.pid for info in mesh.report()] == pids[:1]
        mesh.resize(3)
        check_reduces(mesh)
        mesh.restart()
        assert len(mesh.report()) == 3
        check_reduces(mesh)


def test_resized_mesh_is_attached_and_healed(directory: Path) -> None:
    mesh = cm.start(1, lease_s=60)
    mesh.cell("kept = 5")
    mesh.resize(3)
    mesh.detach()
    with cm.attach() as again:
        assert len(again) == 3
        again.cell("mine = rank")
        again[2].submit_cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait()
        assert again.heal().respawned == (2,)
        assert again[[0, 1]].pull("mine").list == [0, 1]
        assert again[0].pull("kept") == 5
        check_reduces(again)


def test_shards_are_named_and_carried_over_by_a_checkpoint(directory: Path, tmp_path: Path) -> None:
    with cm.start(4) as mesh:
        mesh.cell(f"{MODEL}\noptimizer = torch.optim.SGD(model.parameters()); plain = [1]")
        mesh.cell("out = model(torch.ones(1, 8)).detach()")
        expected = mesh[0].pull("out.tolist()")
        mesh.save("model", path=tmp_path / "saved")
        for size in (2, 3):
            (note,) = mesh.resize(size).notes
            assert "earlier size of the mesh: model, optimizer (" in note
            with pytest.raises(RankFailure, match="is down: it is of a mesh of"):
                mesh.cell("model(torch.ones(1, 8))")
            mesh.cell(f"{MODEL}\noptimizer = torch.optim.SGD(model.parameters())")
            mesh.cell("for _p in model.parameters(): torch.nn.init.zeros_(_p)")
            mesh.load("model", path=tmp_path / "saved")
            mesh.cell("out = model(torch.ones(1, 8)).detach()")
            assert mesh[size - 1].pull("out.tolist()") == expected


def test_mesh_that_is_busy_or_has_dead_ranks_is_not_resized(directory: Path) -> None:
    with cm.start(2) as mesh:
        part = mesh[[0, 1]]
        run = mesh.submit_cell("import time\nwhile True: time.sleep(0.01)")
        with pytest.raises(MeshUsageError, match=r"ranks 0-1 run .*then resize"):
            mesh.resize(3)
        run.interrupt()
        run.wait(WAIT_S)
        mesh[1].submit_cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait()
        with pytest.raises(MeshUsageError, match=r"rank 1 must live.*`%dist_heal`"):
            mesh.resize(3)
        mesh.heal()
        mesh.resize(1)
        with pytest.raises(MeshUsageError, match="there is no rank 1 any more"):
            part.cell("1")
        check_reduces(mesh)


def test_hosts_join_and_leave(directory: Path) -> None:
    """All hosts are this machine."""
    with cm.start(hosts="a:2,b:2", launch=ENGINE, lease_s=60) as mesh:
        mesh.cell("kept = rank + 5")
        mesh.resize(hosts="c:1,d:1", mesh="dp=3,tp=2")
        assert [info.host for info in mesh.report()] == ["a", "a", "b", "b", "c", "d"]
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
        values = mesh.run(lambda: [int(os.environ[name]) for name in names]).list
        assert values == [[0, 4, 2]] * 2 + [[1, 4, 2]] * 2 + [[2, 4, 1], [3, 4, 1]]
        check_reduces(mesh)
        mesh.resize(3, mesh="dp=3")
        assert [info.host for info in mesh.report()] == ["a", "a", "b"]
        check_reduces(mesh)
        assert mesh.pull("kept").list == [5, 6, 7]
        mesh.resize(4)
        assert [info.host for info in mesh.report()] == ["a", "a", "b", "b"]
        check_reduces(mesh)
        (ticket,) = [t for t in find_tickets(directory / "cellmesh") if t.host is None]
        assert (ticket.num_ranks, ticket.layout) == (4, (2, 2))
        mesh.resize(1)
        assert mesh.pull("kept").list == [5]


def test_host_that_cannot_join_changes_nothing(directory: Path) -> None:
    engine = f"sh -c '[ $0 = a ] && exec {ENGINE}; exit 9' {{host}}"
    with cm.start(hosts="a:2", launch=engine) as mesh:
        with pytest.raises(HostError, match=r"c: no agent was started.*exited with 9"):
            mesh.resize(hosts="c:2")
        assert len(mesh) == 2
        check_reduces(mesh)
