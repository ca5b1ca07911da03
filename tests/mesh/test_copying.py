"""What a rank holds, copied to rank 1, which has lost everything: the notebook passes it on
unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.replicas import copy_names
from tests.conftest import check_nothing_left

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
FORGET = """
for _name in [n for n in globals() if not n.startswith("_") and n not in (
        "rank", "local_rank", "world_size", "device", "mesh", "torch", "dist", "In", "Out",
        "get_ipython", "exit", "quit", "open")]:
    del globals()[_name]
import gc; gc.collect(); del gc
"""


@pytest.fixture
def own_four(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Four ranks, 2 x 2, of one test."""
    started = cm.start(4, mesh={"dp": 2, "tp": 2})
    yield started
    started.stop()
    check_nothing_left(runtime_dir)


@pytest.mark.parametrize("num_steps", [1, 2, 4])  # DDP changes its buckets in the second one
def test_state_of_rank_2_goes_on_on_rank_1(own_four: cm.Mesh, num_steps: int) -> None:
    own_four.cell(WORLD)
    own_four.cell(
        f"num_steps = {num_steps}\nfor _ in range(num_steps):\n    train(model, optimizer)"
    )
    own_four[[1]].cell(FORGET)
    copied, refused = copy_names(own_four[2].rank_set, own_four[1].rank_set)
    assert refused == {
        "sharded": "a shard of this rank's: load a checkpoint",
        "sharded_optimizer": "a shard of this rank's: load a checkpoint",
        "lock": "a lock",
    }
    names = "model optimizer scheduler paired twin data Net Numbers train loader"
    assert set(names.split()) <= set(copied)
    own_four[[1]].cell(
        """
assert type(model.module) is Net
assert type(data) is Numbers
assert model.process_group is dist.group.WORLD
assert paired.process_group is mesh.get_group("dp")
assert groups["tp"] is mesh.get_group("tp") and groups["all"] is dist.group.WORLD
assert rows.mesh.tolist() == [1, 3]
assert sampler.rank == 1 and half.rank == 0
assert loader.sampler is sampler and loader.dataset is data
assert optimizer.param_groups[0]["params"][0] is model.module.layer.weight
assert scheduler.optimizer is optimizer
assert train.__globals__ is globals()
"""
    )
    # Ranks whose models have taken steps agree on buckets again, with the one whose model is new.
    own_four[[0, 2, 3]].cell(
        "from cellmesh.workers.replicas.copying import renew_reducers\nrenew_reducers([1])"
    )
    own_four.cell(
        "[train(twin, twin_optimizer) for _ in range(num_steps)]\n"
        "losses = [(train(model, optimizer), train(twin, twin_optimizer)) for _ in range(3)]\n"
        "paired(torch.ones(1, 4) * rank).sum().backward()"
    )
    # In its second step DDP lays out its buckets anew; a copy made before that does so one step
    # later, and adds up in another order until then.
    tolerance = 1e-5 if num_steps == 1 else 0.0
    for losses in own_four.pull("losses").values():
        assert [ours for ours, _ in losses] == pytest.approx(
            [theirs for _, theirs in losses], rel=tolerance, abs=0
        )
    grads = own_four.pull("paired.module.out.bias.grad")
    assert bool((grads[1] == grads[3]).all())


def test_a_rank_that_was_killed_goes_on_in_a_new_process(own_four: cm.Mesh) -> None:
    own_four.cell(WORLD + "del sharded, sharded_optimizer, lock, half")
    own_four.cell(
        "for _ in range(3):\n    train(model, optimizer)\n    train(twin, twin_optimizer)"
    )
    own_four.cell("undisturbed = [train(twin, twin_optimizer) for _ in range(3)]")
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_four[[1]].cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    report = own_four.heal(source=0)
    assert report.copied_to == (1,)
    own_four.submit_cell("losses = [train(model, optimizer) for _ in range(3)]").result(30)
    for rank in (0, 2, 3):
        assert own_four[rank].pull("losses == undisturbed")
    assert own_four.check().equal


def test_a_sampler_that_may_go_by_either_dim_stays_behind(own_four: cm.Mesh) -> None:
    own_four.cell(
        "from torch.utils.data import DistributedSampler\n"
        "half = DistributedSampler(range(8), num_replicas=2, rank=mesh.get_local_rank('dp'))"
    )
    _, refused = copy_names(own_four[0].rank_set, own_four[1].rank_set)  # part 0 of dp, and of tp
    assert refused == {"half": "a DistributedSampler for part 0 of 2: make it again there"}
    copied, _ = copy_names(own_four[2].rank_set, own_four[1].rank_set)  # part 1 of dp, part 0 of tp
    assert "half" in copied
    assert own_four[1].pull("half.rank") == 0


def test_a_value_that_does_not_load_costs_no_other_its_place(own_four: cm.Mesh) -> None:
    own_four.cell(
        "class Odd:\n    def __reduce__(self): return int, ('no number',)\n"
        "weight = torch.arange(4.0).to(torch.float8_e5m2)\n"
        "odd, plain, pair = Odd(), [1], {'same': weight}"
    )
    own_four[[1]].cell(FORGET)
    copied, refused = copy_names(own_four[0].rank_set, own_four[1].rank_set)
    assert set(refused) == {"odd"}
    assert "ValueError" in refused["odd"]
    assert {"Odd", "weight", "plain", "pair"} <= set(copied)
    seen = own_four[1].pull("pair['same'] is weight, str(weight.dtype), plain, 'odd' in globals()")
    assert seen == (True, "torch.float8_e5m2", [1], False)
