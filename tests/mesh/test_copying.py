"""The objects of a rank, copied to one that has lost everything; the core has the kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm

WORLD = """
import threading
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 300), nn.Linear(300, 2)
    def forward(self, x):
        return self.out(torch.tanh(self.layer(x)))

class Numbers(Dataset):
    def __init__(self):
        self.x = torch.arange(32.0).reshape(8, 4) / 10
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i]

def train(model, optimizer):
    sampler.set_epoch(1)
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()

torch.manual_seed(0)
model = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
paired = DistributedDataParallel(Net(), process_group=mesh.get_group("dp"))
torch.manual_seed(0)
twin = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
data = Numbers()
sampler = DistributedSampler(data)
half = DistributedSampler(data, num_replicas=2, rank=mesh.get_local_rank("dp"))
loader = DataLoader(data, batch_size=2, sampler=sampler)
rows = mesh["dp"]
groups = {"tp": mesh.get_group("tp"), "all": dist.group.WORLD}
sharded = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh["dp"])
sharded_optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
lock = threading.Lock()
"""


@pytest.fixture
def own_four(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Four ranks, 2 x 2, of one test."""
    started = cm.start(4, mesh={"dp": 2, "tp": 2})
    yield started
    started.stop()


def test_a_rank_that_was_killed_goes_on_with_the_state_of_another(own_four: cm.Mesh) -> None:
    own_four.cell(WORLD)
    own_four.cell(
        "for _ in range(3):\n    train(model, optimizer)\n    train(twin, twin_optimizer)\n"
        "undisturbed = [train(twin, twin_optimizer) for _ in range(3)]"
    )
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_four[[1]].cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert own_four.heal(source=2).copied_to == (1,)
    own_four[[1]].cell(
        """
assert type(model.module) is Net
assert type(data) is Numbers
assert model.process_group is dist.group.WORLD
assert paired.process_group is mesh.get_group("dp")
assert groups["tp"] is mesh.get_group("tp") and groups["all"] is dist.group.WORLD
assert rows.mesh.tolist() == [1, 3]
assert sampler.rank == 1
assert loader.sampler is sampler and loader.dataset is data
assert optimizer.param_groups[0]["params"][0] is model.module.layer.weight
assert scheduler.optimizer is optimizer
assert train.__globals__ is globals()
assert not {"sharded", "sharded_optimizer", "half", "lock"} & set(globals())
"""
    )
    own_four.submit_cell("losses = [train(model, optimizer) for _ in range(3)]").result(30)
    for rank in (0, 2, 3):
        assert own_four[rank].pull("losses == undisturbed")
    own_four.cell("paired(torch.ones(1, 4) * rank).sum().backward()")
    grads = own_four.pull("paired.module.out.bias.grad")
    assert bool((grads[1] == grads[3]).all())
