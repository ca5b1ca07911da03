"""Checkpoints on four ranks, 2 x 2: what is saved comes back in place, on other meshes, and in
plain DCP.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cellmesh as cm
from cellmesh.errors import MeshUsageError

SETUP = """
import os
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))

def sharded(seed, mesh):
    model = net(seed)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def train(model, optimizer, part, num_steps=2):
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + part))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()

def whole(model):
    return [getattr(p, "full_tensor", lambda: p)().detach().clone() for p in model.parameters()]
"""
MODELS = """
fsdp, adam = sharded(1, mesh["dp"])
schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
ddp = DistributedDataParallel(net(2))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
tp = parallelize_module(net(3), mesh["tp"], plan)
momentum = torch.optim.SGD(tp.parameters(), lr=0.1, momentum=0.9)
grid = distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0), Shard(1)])
table, own = torch.arange(5), torch.full((2,), float(rank))
step, history, settings = 7, [1.0, float(rank)], {"lr": 0.1, "more": {"dims": [1, 2]}}
dp = mesh["dp"].get_local_rank()
everything = lambda: (
    train(fsdp, adam, dp), schedule.last_epoch, train(ddp, sgd, rank), train(tp, momentum, 0),
    grid.full_tensor().tolist(), table.tolist(), own.tolist(), step, list(history), dict(settings),
)
objects = lambda: [id(globals()[name]) for name in NAMES.split() if name != "step"]
everything(); schedule.step()
"""
NAMES = "fsdp adam schedule ddp sgd tp momentum grid table own step history settings"
SPOIL = """
before = objects()
for model in (fsdp, ddp, tp):
    for parameter in model.parameters():
        getattr(parameter, "to_local", lambda: parameter)().detach().zero_()
adam.state.clear(); momentum.state.clear(); schedule.last_epoch = 99
adam.param_groups[0]["lr"] = 5.0
grid.to_local().zero_(); table.zero_(); own.zero_(); step = 0; history[:] = []; settings.clear()
"""


@pytest.fixture(scope="module", autouse=True)
def _models(mesh: cm.Mesh) -> None:
    mesh.cell(f"{SETUP}\nNAMES = {NAMES!r}\n{MODELS}")


def test_all_kinds_of_values_are_loaded_in_place(mesh: cm.Mesh, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "latest"
    mesh.save(*NAMES.split(), path=path)
    wanted = mesh.pull("everything()")
    mesh.cell(SPOIL)
    assert set(mesh.load(path=path)) == set(NAMES.split())
    assert mesh.pull("everything()") == wanted
    assert all(mesh.pull("before == objects()").values())
    assert [entry.name for entry in path.parent.iterdir()] == ["latest"]


def test_checkpoint_is_plain_dcp(mesh: cm.Mesh, tmp_path: Path) -> None:
    mesh.save("fsdp", "step", "table", path=tmp_path / "ours")
    state = {
        "fsdp": {"0.weight": torch.zeros(10, 6)},
        "table": torch.zeros(5, dtype=torch.int64),
        "step": 0,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=str(tmp_path / "ours"))
    assert state["step"] == 7
    assert state["table"].tolist() == [0, 1, 2, 3, 4]
    full = mesh.pull("whole(fsdp)")
    assert torch.equal(state["fsdp"]["0.weight"], full[0][0])
    mesh.push(theirs=str(tmp_path / "theirs"))
    mesh.cell(
        "import torch.distributed.checkpoint as dcp\n"
        "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
        "model_state, adam_state = get_state_dict(fsdp, adam)\n"
        "dcp.save({'fsdp': model_state, 'adam': adam_state, 'step': 8}, checkpoint_id=theirs)\n"
    )
    mesh.load("step", "fsdp", "adam", path=tmp_path / "theirs")
    assert mesh.pull("step").list == [8] * 4
    mesh.cell("step = 7")


def test_other_dims_and_fewer_ranks_load_it(
    mesh: cm.Mesh, own_mesh: cm.Mesh, tmp_path: Path
) -> None:
    mesh.cell("model, optimizer = sharded(6, mesh._flatten()); train(model, optimizer, rank)")
    mesh.save("model", "optimizer", "own", "history", path=tmp_path / "four")
    wanted = mesh.pull("whole(model)")[0]
    mesh.cell("model, optimizer = sharded(7, mesh['tp'])")
    mesh.load("model", "optimizer", path=tmp_path / "four")
    own_mesh.cell(SETUP + "model, optimizer = sharded(7, mesh)")
    loaded = own_mesh.load(path=tmp_path / "four")
    assert set(loaded) == {"model", "optimizer", "own", "history"}
    for part in (mesh, own_mesh):
        for got in part.pull("whole(model)").values():
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    moments = "[s['exp_avg'].full_tensor() for s in optimizer.state.values()]"
    for one, other in zip(mesh.pull(moments)[3], own_mesh.pull(moments)[1], strict=True):
        assert torch.equal(one, other)
    assert own_mesh.pull("own.tolist()").list == [[0.0, 0.0], [1.0, 1.0]]
    # And back on more: what each rank had of its own is not there for the others.
    own_mesh.save("own", path=tmp_path / "two")
    with pytest.raises(MeshUsageError, match=r"ranks 2-3: 'own' was different on each of 2 ranks"):
        mesh.load("own", path=tmp_path / "two")
    mesh[:2].load("own", path=tmp_path / "two")


def refused_load(mesh: cm.Mesh, words: str, *names: str, path: Path) -> None:
    with pytest.raises(MeshUsageError, match=words):
        mesh.load(*names, path=path)


def test_impossible_save_or_load_is_refused_and_changes_nothing(
    mesh: cm.Mesh, tmp_path: Path
) -> None:
    mesh.cell(
        "step = 7\nif rank < 3:\n    here = 1\nlone = torch.optim.SGD([torch.zeros(2)], lr=0.1)"
    )
    path, data = tmp_path / "saved", tmp_path / "data"
    for names, words in (
        ("here", r"rank 3: there is no name 'here'"),
        ("settngs", r"there is no name 'settngs' \(did you mean 'settings'\?\)"),
        ("lone", r"'lone' is an optimizer, and no module at top level has all"),
        ("train os mesh", r"nothing was saved: ranks 0-3: \w*Error"),
    ):
        with pytest.raises((MeshUsageError, cm.RankFailure), match=words):
            mesh.save(*names.split(), path=path)
    assert not list(tmp_path.iterdir())
    data.mkdir()
    (data / "notes.txt").touch()
    with pytest.raises(MeshUsageError, match=r"holds what is no checkpoint's \(notes.txt\)"):
        mesh.save("step", path=data)
    refused_load(mesh, "there is nothing at", path=path)
    refused_load(mesh, "is no checkpoint", path=data)
    mesh.save("step", "fsdp", path=path)
    refused_load(mesh, r"has no 'stap' \(did you mean 'step'\?\); it has ", "stap", path=path)
    mesh.cell("kept, step = fsdp, 8")
    mesh.cell("fsdp = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))")
    words = r"fsdp.0.weight is \(10, 6\) in the checkpoint, and \(9, 6\) here"
    refused_load(mesh, words, "step", "fsdp", path=path)
    assert mesh.pull("step").list == [8] * 4
    mesh.cell("del fsdp, step")
    refused_load(mesh, "there is no name 'fsdp' to load into", path=path)
    mesh.load("step", path=path)
    mesh.cell("fsdp = kept")
    assert mesh.pull("step").list == [7] * 4


def test_incomplete_checkpoint_is_reported(mesh: cm.Mesh, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    mesh.save("grid", path=path)
    file, words = path / "__2_0.distcp", "is not complete: __2_0.distcp is missing or too short"
    file.write_bytes(file.read_bytes()[:-1])
    refused_load(mesh, words, path=path)
    file.unlink()
    refused_load(mesh, words, path=path)
    (path / ".metadata").write_bytes(b"?")
    refused_load(mesh, r"saved cannot be read: \w*Error", path=path)


def test_files_that_rank_0_cannot_see_are_reported(mesh: cm.Mesh, tmp_path: Path) -> None:
    """As on hosts that do not share the directory: rank 3's path leads elsewhere."""
    mesh.save("grid", path=tmp_path / "shared" / "saved")
    (tmp_path / "own").mkdir()
    mesh.push(elsewhere=(str(tmp_path / "shared"), str(tmp_path / "own")))
    mesh[3].cell(
        "import pathlib\nresolve = pathlib.Path.resolve\n"
        "pathlib.Path.resolve = lambda self: pathlib.Path(str(resolve(self)).replace(*elsewhere))"
    )
    try:
        with pytest.raises(
            cm.RankFailure,
            match=r"not saved: rank 0: FileNotFoundError: __3_0.distcp is not in .*: do all hosts "
            r"share it\?; .*saved is as it was",
        ):
            mesh.save("grid", path=tmp_path / "shared" / "saved")
    finally:
        mesh[3].cell("pathlib.Path.resolve = resolve")
    assert [entry.name for entry in (tmp_path / "shared").iterdir()] == ["saved"]
    assert not list((tmp_path / "own").iterdir())
    mesh.load("grid", path=tmp_path / "shared" / "saved")
