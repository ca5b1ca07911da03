"""In the form of pytorch/examples, distributed/tensor_parallelism: also with `--sequence`."""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

is_sharded = "--sequence" in sys.argv


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(10) if is_sharded else nn.Identity()
        self.in_proj = nn.Linear(10, 32)
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(torch.relu(self.in_proj(self.norm(x))))


# %%
device_mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
if is_sharded:
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "in_proj": ColwiseParallel(input_layouts=Shard(0)),
        "out_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    plan["norm"].sequence_sharding = (Shard(0),)
model = parallelize_module(ToyModel(), device_mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)

# %% steps
losses = []
for i in range(4):
    torch.manual_seed(10 * i + is_sharded * device_mesh.get_rank())
    optimizer.zero_grad()
    output = model(torch.rand(20, 10))
    output.sum().backward()
    optimizer.step()
    losses.append(output.sum().item())

# %%
parameters = [p.full_tensor() for p in model.parameters()]
