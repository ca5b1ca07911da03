"""A save that is struck leaves the checkpoint that was there, and a mesh that goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError, MeshUsageError
from tests.conftest import check_nothing_left, processes_of

WAIT_S = 30.0
SETUP = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = torch.nn.Linear(6, 10)
fully_shard(model)
def fill(value):
    for parameter in model.parameters():
        parameter.to_local().detach().fill_(value)
def value():
    return {p.full_tensor().unique().item() for p in model.parameters()}
fill(1.0)
"""
# The rank begins to write when somebody opens the other end of its gate.
GATED = """
import os
from torch.distributed.checkpoint.filesystem import FileSystemWriter
write_data = FileSystemWriter.write_data
def gated(*args):
    if os.path.exists(gate):
        with open(gate):
            pass
    return write_data(*args)
FileSystemWriter.write_data = gated
"""


@pytest.fixture
def checkpoint(own_mesh: cm.Mesh, tmp_path: Path) -> Path:
    """Of ones; the next save waits before rank 1 writes, until `open_gate`."""
    own_mesh.cell(SETUP)
    path = tmp_path / "runs" / "latest"
    own_mesh.save("model", path=path)
    own_mesh.push(gate=str(tmp_path / "gate"))
    own_mesh[1].cell(GATED)
    os.mkfifo(tmp_path / "gate")
    own_mesh.cell("fill(2.0)")
    return path


def open_gate(checkpoint: Path) -> None:
    gate = checkpoint.parent.parent / "gate"
    with open(gate, "w"):
        gate.unlink()


@pytest.fixture
def saving(own_mesh: cm.Mesh, checkpoint: Path) -> Iterator[Future[None]]:
    """A save that waits before rank 1 writes; rank 0 has written its file."""
    with ThreadPoolExecutor(1) as pool:
        save = pool.submit(own_mesh.save, "model", path=checkpoint)
        while not list(checkpoint.parent.glob(".latest.*.saving/__0_0.distcp")):
            assert not save.done(), save.exception()
        yield save


def check_goes_on(mesh: cm.Mesh, checkpoint: Path) -> None:
    """The old checkpoint is whole, loads, and is replaced by the next save, which clears up."""
    mesh.load("model", path=checkpoint)
    assert mesh.pull("value()").list == [{1.0}] * 2
    mesh.cell("fill(3.0)")
    mesh.save("model", path=checkpoint)
    mesh.cell("fill(0.0)")
    mesh.load("model", path=checkpoint)
    assert mesh.pull("value()").list == [{3.0}] * 2
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["latest"]


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_during_a_save_leaves_the_old_checkpoint(
    own_mesh: cm.Mesh, checkpoint: Path, saving: Future[None], victim: int
) -> None:
    os.kill(own_mesh.report()[victim].pid, signal.SIGKILL)
    with pytest.raises(cm.RankFailure, match=f"rank {victim} was killed"):
        saving.result(WAIT_S)
    with pytest.raises(MeshUsageError, match=f"rank {victim} died"):
        own_mesh.save("model", path=checkpoint)
    own_mesh.heal()
    (checkpoint.parent.parent / "gate").unlink()
    own_mesh[victim].cell(SETUP)
    check_goes_on(own_mesh, checkpoint)


def test_mesh_killed_during_a_save_leaves_the_old_checkpoint(
    own_mesh: cm.Mesh, checkpoint: Path, saving: Future[None], runtime_dir: Path
) -> None:
    processes = [
        *processes_of(runtime_dir),
        *(psutil.Process(rank.pid) for rank in own_mesh.report()),
    ]
    for process in dict.fromkeys(processes):
        process.kill()
    psutil.wait_procs(processes, timeout=WAIT_S)
    with pytest.raises(CellmeshError):
        saving.result(WAIT_S)
    own_mesh.stop()
    check_nothing_left(runtime_dir)
    assert len(list(checkpoint.parent.iterdir())) == 2
    with cm.start(2) as again:
        again.cell(SETUP)
        check_goes_on(again, checkpoint)


def test_save_can_be_interrupted(own_mesh: cm.Mesh, checkpoint: Path, saving: Future[None]) -> None:
    own_mesh.interrupt()
    with pytest.raises(KeyboardInterrupt):
        saving.result(WAIT_S)
    (checkpoint.parent.parent / "gate").unlink()
    check_goes_on(own_mesh, checkpoint)
