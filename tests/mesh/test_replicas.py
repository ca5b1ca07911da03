"""Replicas on four ranks, 2 x 2: what differs is found where it is, and made equal in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellmesh as cm
from cellmesh.controller.replicas import CheckReport
from cellmesh.errors import MeshUsageError

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


def test_a_healthy_model_and_its_optimizer_are_equal(clean: cm.Mesh) -> None:
    clean.cell(f"{DDP}{ADAM}")
    report = clean.check()
    assert report.equal
    assert report.num_compared > 6 * 3
    assert {found.path for found, _ in report.expected} <= {"rng.torch", "rng.python", "rng.numpy"}
    assert clean.check("optimizer").equal
    assert clean[0].check("model").num_compared == 0


def test_batch_statistics_differ_as_they_may(clean: cm.Mesh) -> None:
    clean.cell(
        DDP
        + "model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))\n"
        + "model(torch.rand(5, 4) + rank).sum().backward()"
    )
    report = clean.check("model")
    assert report.equal
    assert "model.module.1.running_mean" in {found.path for found, _ in report.expected}


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


def test_only_the_first_differences_are_measured(clean: cm.Mesh) -> None:
    clean.cell("x = [torch.full((2,), float(rank + i)) for i in range(10)]")
    found = clean.check("x").differences
    assert [bool(each.distances) for each in found] == [True] * 3 + [False] * 7
    assert {r: far.max_abs for r, far in found[0].distances.items()} == {1: 1.0, 2: 2.0, 3: 3.0}


def test_plain_models_are_compared_where_they_are_named(clean: cm.Mesh) -> None:
    clean.cell("torch.manual_seed(rank // 2); net = torch.nn.Linear(2, 2)")
    assert clean.check().not_wrapped == ("net",)
    assert differing(clean.check("net"))["net.weight"] == ((0, 1), (2, 3))
    assert clean[2:].check("net").equal


def test_different_structure_is_reported(clean: cm.Mesh) -> None:
    clean.cell("net = torch.nn.Linear(2, 3 if rank == 1 else 2, bias=rank != 3)")
    report = clean.check("net")
    found = {difference.path: difference for difference in report.differences}
    assert found["net.bias"].missing == (3,)
    assert found["net.weight"].what == "shape or dtype"
    with pytest.raises(cm.RankFailure, match="nothing was changed"):
        clean.sync("net", 0)


def test_missing_names_are_reported(clean: cm.Mesh) -> None:
    clean.cell("if rank < 3:\n    here = torch.ones(2)")
    with pytest.raises(cm.RankFailure, match="here"):
        clean.check("here")
    with pytest.raises(cm.RankFailure, match=r"nothing was changed: rank 3: NameError"):
        clean.sync("here", 0)
    assert clean.pull("rank").list == [0, 1, 2, 3]


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


def test_tensor_parallel_norms_are_compared_within_their_group(clean: cm.Mesh) -> None:
    clean.cell(
        """
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
with torch.no_grad():
    if rank == 3:
        model[2].weight += 1  # plain, beside sharded ones
    if rank == 1:
        model[1].bias.to_local().add_(1)  # replicated over tp
    model[0].weight.to_local().add_(rank)  # sharded over tp
"""
    )
    report = clean.check("model")
    assert differing(report) == {"model.2.weight": ((2,), (3,)), "model.1.bias": ((0,), (1,))}
    assert report.num_alone == 3
    done = clean.sync("model", 0)
    assert clean.check("model").equal
    assert "have no replica and were left as they were" in repr(done)


def test_a_dtensor_is_compared_by_its_placements(clean: cm.Mesh) -> None:
    clean.cell(
        """
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate()])
y = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Replicate()])
z = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
if rank == 3:
    for t in (x, y, z):
        t.to_local().add_(1)
"""
    )
    report = clean.check("{'x': x, 'y': y, 'z': z}")
    assert differing(report) == {
        "{'x': x, 'y': y, 'z': z}['x']": ((2,), (3,)),
        "{'x': x, 'y': y, 'z': z}['y']": ((0, 1, 2), (3,)),
    }
    clean.sync("(x, y, z)", 0)
    clean.cell("w = [t.to_local().tolist() for t in (x, y, z)]")
    assert clean[3].pull("w") == [[4, 5, 6, 7], list(range(8)), [7, 8]]
    assert clean.check("z").equal


def test_groups_of_their_own_are_respected(clean: cm.Mesh) -> None:
    clean.cell(
        DDP
        + "model = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.get_group('dp'))\n"
        + "model.module.weight.data.fill_(rank % 2)\n"
        + "if rank == 3:\n    model.module.bias.data += 1"
    )
    assert differing(clean.check()) == {"model.module.bias": ((1,), (3,))}
    clean.sync("model", 2)  # in each group from the second
    assert clean.check().equal
    bias = clean.pull("model.module.bias.detach()")
    weight = clean.pull("model.module.weight[0, 0].item()")
    assert bool((bias[1] == bias[3]).all())
    assert weight.list == [0, 1, 0, 1]


# ---- making equal


def test_an_interrupted_adam_step_is_found_and_repaired(clean: cm.Mesh) -> None:
    clean.cell(
        DDP
        + "model, twin = make(), make()\n"
        + "optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)\n"
        + "other = torch.optim.Adam(twin.parameters(), lr=0.1, foreach=False)\n"
        + "step(model, optimizer); step(twin, other); step(twin, other)\n"
        + "before = [(id(p), p.data_ptr()) for p in model.parameters()]"
    )
    with pytest.raises(cm.RankFailure, match="KeyboardInterrupt"):
        clean.cell(INTERRUPTED_STEP)
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


def test_state_that_the_source_lacks_goes(clean: cm.Mesh) -> None:
    clean.cell(f"{DDP}{ADAM}if rank == 0: optimizer.state.clear()")
    clean.sync("optimizer", 0)
    assert clean.pull("len(optimizer.state)").list == [0] * 4
    assert clean.check().equal


def test_generators_are_made_equal_where_that_is_asked(clean: cm.Mesh) -> None:
    seeds = "torch.manual_seed(rank); random.seed(rank); np.random.seed(rank)"
    clean.cell(f"import random, numpy as np\n{seeds}")
    assert set(differing(clean.check("rng"))) == {"rng.torch", "rng.python", "rng.numpy"}
    assert clean.check().equal
    clean.sync("rng", 3)
    assert clean.check("rng").equal
    clean.cell("drawn = (torch.rand(1).item(), random.random(), np.random.rand())")
    assert len(set(clean.pull("drawn").list)) == 1


def test_many_kinds_of_tensors_are_made_equal(clean: cm.Mesh) -> None:
    clean.cell(
        """
kinds = [torch.bool, torch.bfloat16, torch.float8_e4m3fn]
kinds += [torch.complex64, torch.int16, torch.float64]
x = [torch.full((3,), 1 + rank).to(kind) for kind in kinds]
x += [torch.full((2, 3), float(rank)).t(), torch.tensor(float(rank)), torch.empty(0)]
x += [[rank, "a"], float(rank)]
before = [id(t) for t in x[:9]]
"""
    )
    clean.sync("x", 1)
    assert clean.check("x").equal
    seen = "before == [id(t) for t in x[:9]], x[-1], x[6].tolist()[0], x[-2]"
    assert clean.pull(seen).list == [(True, 1.0, [1, 1], [1, "a"])] * 4


def test_bad_calls_are_refused(clean: cm.Mesh) -> None:
    with pytest.raises(MeshUsageError, match="there is no rank 4"):
        clean.sync("x", 4)
    with pytest.raises(MeshUsageError, match="all ranks take part"):
        clean[:2].sync("x", 0)
    with pytest.raises(cm.RankFailure, match="no wrapped model"):
        clean.sync("", 0)
    clean.cell("text = 'a'; nothing = object()")
    with pytest.raises(cm.RankFailure, match="without tensors or numbers"):
        clean.check("nothing")
    assert clean.check("text").equal
