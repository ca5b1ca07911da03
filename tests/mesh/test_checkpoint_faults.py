"""A save that is struck leaves the checkpoint that was there, and a mesh that goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import cellmesh as cm
from cellmesh.errors import HostError, MeshUsageError
from tests.conftest import check_nothing_left, processes_of
from tests.mesh.conftest import Recorder

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


@pytest.fixture
def shown(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What saves tell."""
    monkeypatch.setattr("cellmesh.controller.rank_set.current_sink", lambda *args: recorder)
    return recorder


def open_gate(checkpoint: Path) -> None:
    gate = checkpoint.parent.parent / "gate"
    with open(gate, "w"):
        gate.unlink()


def wait_for_save(shown: Recorder, part: str) -> str:
    with shown._changed:
        assert shown._changed.wait_for(
            lambda: any(part in line for _, line in shown.lines()), WAIT_S
        ), shown.lines()
    return next(line for _, line in shown.lines() if part in line)


def check_goes_on(mesh: cm.Mesh, checkpoint: Path) -> None:
    """What was there is whole, loads, and is replaced by the next save, which clears up."""
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
    own_mesh: cm.Mesh, checkpoint: Path, shown: Recorder, victim: int
) -> None:
    own_mesh.save("model", path=checkpoint, wait=False)
    os.kill(own_mesh.report()[victim].pid, signal.SIGKILL)
    if victim == 0:
        open_gate(checkpoint)
    line = wait_for_save(shown, "died before it was written")
    assert (
        line
        == f"model: not saved: rank {victim} died before it was written; {checkpoint} is as it was"
    )
    with pytest.raises((MeshUsageError, cm.RankFailure), match=f"rank {victim} (died|was killed)"):
        own_mesh.save("model", path=checkpoint)
    own_mesh.heal()
    own_mesh[victim].cell(SETUP)
    check_goes_on(own_mesh, checkpoint)


def test_a_rank_dies_before_the_state_is_copied(own_mesh: cm.Mesh, checkpoint: Path) -> None:
    own_mesh.cell(
        "class Deadly:\n    def state_dict(self):\n        os._exit(3)\n    def "
        "load_state_dict(self, s):\n        pass\nimport os\ndeadly = Deadly() if rank == 1 else "
        "torch.optim.lr_scheduler.ConstantLR(\n    torch.optim.SGD(model.parameters(), lr=1.0))"
    )
    with pytest.raises(cm.RankFailure, match="rank 1 exited with code 3"):
        own_mesh.save("model", "deadly", path=checkpoint)
    own_mesh.heal()
    own_mesh[1].cell(SETUP)
    check_goes_on(own_mesh, checkpoint)


def test_cell_that_fails_during_a_save_leaves_the_save_alone(
    own_mesh: cm.Mesh, checkpoint: Path, shown: Recorder
) -> None:
    own_mesh.save("model", path=checkpoint, wait=False)
    with pytest.raises(cm.RankFailure, match="boom"):
        own_mesh.submit_cell(
            "if rank == 0:\n    raise ValueError('boom')\ndist.barrier()", sink=shown
        ).result(WAIT_S)
    assert own_mesh.pull("value()").list == [{2.0}] * 2  # a collective, on groups that were healed
    open_gate(checkpoint)
    assert wait_for_save(shown, "model: ").startswith("model: saved in ")
    own_mesh.cell("fill(0.0)")
    own_mesh.load("model", path=checkpoint)
    assert own_mesh.pull("value()").list == [{2.0}] * 2


def test_wait_for_a_save_can_be_interrupted(
    own_mesh: cm.Mesh, checkpoint: Path, shown: Recorder
) -> None:
    failed: list[BaseException] = []

    def save() -> None:
        try:
            own_mesh.save("model", path=checkpoint)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    writes = "any(t.name == 'cellmesh-save' for t in __import__('threading').enumerate())"
    while not any(state.run >= 0 for state in own_mesh.states().values()) or not list(
        checkpoint.parent.glob(".latest.*.saving/.written-0")
    ):
        assert thread.is_alive(), failed
    own_mesh.interrupt()
    thread.join(WAIT_S)
    assert isinstance(failed[0], KeyboardInterrupt)
    assert own_mesh.pull(writes).list == [True] * 2  # it goes on
    open_gate(checkpoint)
    own_mesh.load("model", path=checkpoint)
    assert own_mesh.pull("value()").list == [{2.0}] * 2


def test_rank_that_cannot_write_is_named(own_mesh: cm.Mesh, checkpoint: Path) -> None:
    own_mesh[1].cell(
        "def full(*args):\n    raise OSError(28, 'No space left on device')\n"
        "FileSystemWriter.write_data = full"
    )
    no_space = r"not saved: rank 1: OSError: \[Errno 28\] No space left on device"
    words = rf"{no_space}; {checkpoint} is as it was"
    with pytest.raises(cm.RankFailure) as caught:
        own_mesh.save("model", path=checkpoint)
    for error in caught.value.exceptions_by_rank.values():
        assert isinstance(error, HostError)
        assert re.search(words, str(error))
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["latest"]
    own_mesh[1].cell("FileSystemWriter.write_data = write_data")
    check_goes_on(own_mesh, checkpoint)


def test_mesh_killed_during_a_save_leaves_the_old_checkpoint(
    own_mesh: cm.Mesh, checkpoint: Path, runtime_dir: Path
) -> None:
    own_mesh.save("model", path=checkpoint, wait=False)
    processes = [
        *processes_of(runtime_dir),
        *(psutil.Process(rank.pid) for rank in own_mesh.report()),
    ]
    for process in dict.fromkeys(processes):
        process.kill()
    psutil.wait_procs(processes, timeout=WAIT_S)
    own_mesh.stop()
    check_nothing_left(runtime_dir)
    assert len(list(checkpoint.parent.iterdir())) == 2
    with cm.start(2) as again:
        again.cell(SETUP)
        check_goes_on(again, checkpoint)


def test_stop_waits_for_a_save(own_mesh: cm.Mesh, checkpoint: Path) -> None:
    own_mesh.save("model", path=checkpoint, wait=False)
    opener = threading.Thread(target=open_gate, args=(checkpoint,))
    opener.start()
    own_mesh.stop()
    opener.join(WAIT_S)
    state = {"model": {"bias": torch.zeros(10)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=str(checkpoint))
    assert state["model"]["bias"].unique().item() == 2.0
