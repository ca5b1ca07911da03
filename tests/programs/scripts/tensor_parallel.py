"""In the form of pytorch/examples, distributed/tensor_parallelism/tensor_parallel_example.py."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


# %%
_world_size = int(os.environ["WORLD_SIZE"])
device_mesh = init_device_mesh("cpu", (_world_size,))
torch.manual_seed(0)
tp_model = parallelize_module(
    ToyModel(), device_mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
)
optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.25, foreach=True)

# %% steps
losses = []
for i in range(4):
    torch.manual_seed(i)
    optimizer.zero_grad()
    output = tp_model(torch.rand(20, 10))
    output.sum().backward()
    optimizer.step()
    losses.append(output.sum().item())

# %%
parameters = [p.full_tensor() for p in tp_model.parameters()]
