"""Meshes that get another number of ranks between cells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RankFailure
from tests.conftest import clean_runtime_dir

REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"
MODEL = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(8, 8))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with clean_runtime_dir() as directory:
        yield directory


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
