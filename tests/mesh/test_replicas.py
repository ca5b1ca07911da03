"""Replicas on four ranks, 2 x 2: what differs is found where it is, and made equal in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellmesh as cm
from cellmesh.controller.replicas import CheckReport

from .conftest import Recorder

DDP = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return DistributedDataParallel(model)
def step(model, optimizer):
    optimizer.zero_grad()
    x = torch.arange(12.0).reshape(3, 4) * (rank + 1) / 10
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss := loss.detach())
    return loss.item()
"""
ADAM = """
model = make()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
step(model, optimizer)
"""
# An optimizer whose loop over parameters ends in its middle.
INTERRUPTED_STEP = """
from unittest import mock
real, num_calls = torch.Tensor.addcdiv_, 0
def stop(*args, **kwargs):
    global num_calls
    num_calls += 1
    if num_calls > 2:
        raise KeyboardInterrupt
    return real(*args, **kwargs)
if rank == 2:
    with mock.patch.object(torch.Tensor, "addcdiv_", stop):
        step(model, optimizer)
else:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(3, 4) * (rank + 1) / 10).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def clean(mesh: cm.Mesh) -> Iterator[cm.Mesh]:
    """The mesh, with no names of an earlier test."""
    yield mesh
    mesh.cell(
        "for _name in [n for n in globals() if not n.startswith('_') and n not in (\n"
        "    'rank', 'local_rank', 'world_size', 'device', 'mesh', 'torch', 'dist', 'In', 'Out',\n"
        "    'get_ipython', 'exit', 'quit', 'open')]:\n"
        "    del globals()[_name]"
    )


def differing(report: CheckReport) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {found.path: found.groups for found in report.differences}


# ---- what is equal, and what is not


def test_a_replica_that_was_changed_is_found_with_how_far(clean: cm.Mesh) -> None:
    clean.cell(DDP + "model = make()\nif rank == 2:\n    model.module[2].weight.data[1, 3] += 0.5")
    report = clean.check()
    assert differing(report) == {"model.module.2.weight": ((0, 1, 3), (2,))}
    far = report.differences[0].distances[2]
    assert (far.num_differing, far.num_elements, far.first_index) == (1, 64, (1, 3))
    assert far.max_abs == pytest.approx(0.5)
    assert "rank 2: 1 of 64 elements, up to 0.5 apart; first at [1, 3]" in repr(report)
    part = clean.check("model.module[2].weight")
    assert differing(part) == {"model.module[2].weight": ((0, 1, 3), (2,))}
    assert clean[:2].check("model").equal


# ---- by placements


def test_hybrid_sharded_parameters_are_compared_along_the_replicas(clean: cm.Mesh) -> None:
    clean.cell(
        """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
step()
before = [(id(p), p.to_local().data_ptr()) for p in model.parameters()]
with torch.no_grad():
    if rank == 3:
        model[0].weight.to_local()[1, 2] += 1
        optimizer.state[model[1].bias]["exp_avg"].to_local().add_(2)
"""
    )
    report = clean.check()
    assert differing(report) == {
        "model.0.weight": ((1,), (3,)),
        "optimizer.state[model.1.bias].exp_avg": ((1,), (3,)),
    }
    assert report.differences[0].distances[3].first_index == (1, 2)
    clean.sync("model", 0)
    assert set(differing(clean.check())) == {"optimizer.state[model.1.bias].exp_avg"}
    clean.sync("optimizer", 2)  # rank 3 stands where rank 2 does: it is right
    assert clean.check().equal
    clean.cell("assert before == [(id(p), p.to_local().data_ptr()) for p in model.parameters()]")
    losses = clean.run(lambda: step())  # noqa: F821
    assert len(set(losses.list)) == 1


def test_groups_of_their_own_are_respected(clean: cm.Mesh) -> None:
    clean.cell(
        DDP
        + "model = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.get_group('dp'))\n"
        + "model.module.weight.data.fill_(rank % 2)"
    )
    assert clean.check().equal
    clean.sync("model", 2)  # in each group from the second
    assert clean.pull("model.module.weight[0, 0].item()").list == [0, 1, 0, 1]


def test_tensor_parallel_norms_are_compared_within_their_group(clean: cm.Mesh) -> None:
    clean.cell(
        """
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
with torch.no_grad():
    model[1].weight += rank // 2 + (rank == 3)  # plain, beside a layer that is sharded over tp
"""
    )
    assert differing(clean.check("model")) == {"model.1.weight": ((2,), (3,))}


# ---- making equal


def test_an_interrupted_adam_step_is_found_and_repaired(clean: cm.Mesh, recorder: Recorder) -> None:
    clean.cell(
        DDP
        + "model, twin = make(), make()\n"
        + "optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)\n"
        + "other = torch.optim.Adam(twin.parameters(), lr=0.1, foreach=False)\n"
        + "step(model, optimizer); step(twin, other); step(twin, other)\n"
        + "before = [(id(p), p.data_ptr()) for p in model.parameters()]"
    )
    with pytest.raises(cm.RankFailure, match="KeyboardInterrupt"):
        clean.submit_cell(INTERRUPTED_STEP, sink=recorder).result()
    recorder.wait_for_note("an optimizer's step was interrupted")
    report = clean.check("(model, optimizer)")
    found = differing(report)
    # Two parameters have stepped on rank 2, and the third one's moments.
    assert "(model, optimizer)[0].module.0.weight" not in found
    assert found["(model, optimizer)[0].module.2.weight"] == ((0, 1, 3), (2,))
    assert any(".step" in path for path in found)
    clean.sync("(model, optimizer)", 0)
    assert clean.check().equal
    clean.cell("assert before == [(id(p), p.data_ptr()) for p in model.parameters()]")
    clean.cell("losses = [(step(model, optimizer), step(twin, other)) for _ in range(3)]")
    for losses in clean.pull("losses").values():
        assert all(ours == theirs for ours, theirs in losses)


def test_state_that_some_ranks_lack_is_made(clean: cm.Mesh) -> None:
    clean.cell(
        f"{DDP}{ADAM}if rank == 2: optimizer.state.clear()\n"
        "if rank == 3: optimizer.param_groups[0]['lr'] = 0.5"
    )
    report = clean.check()
    assert {found.missing for found in report.differences if ".state[" in found.path} == {(2,)}
    assert "optimizer.param_groups[0].lr" in differing(report)
    done = clean.sync("optimizer", 0)
    assert [rank for rank, report in done.reports.items() if report.num_created] == [2]
    assert clean.check().equal
    assert clean.pull("optimizer.param_groups[0]['lr']").list == [0.1] * 4
    clean.cell("step(model, optimizer)")
    assert clean.check().equal
    clean.cell(
        "net = nn.Linear(2, 3 if rank == 1 else 2); was = net.weight.detach().clone()\n"
        "if rank < 3: here = torch.ones(2)"
    )
    with pytest.raises(cm.RankFailure, match="nothing was changed"):
        clean.sync("net", 0)
    clean.cell("assert net.weight.equal(was)")
    with pytest.raises(cm.RankFailure, match=r"nothing was changed: rank 3: NameError"):
        clean.sync("here", 0)
