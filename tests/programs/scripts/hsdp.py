"""In the form of PyTorch's DeviceMesh recipe: shards within one dim, replicas over the other."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# %%
mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)), mesh=mesh_2d)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# %% steps
losses = []
for i in range(4):
    torch.manual_seed(10 * i + mesh_2d.get_rank())
    model.set_requires_gradient_sync(i % 2 == 1)
    if i % 2 == 0:
        optimizer.zero_grad()
    loss = model(torch.randn(8, 10)).pow(2).mean()
    loss.backward()
    if i % 2 == 1:
        optimizer.step()
    losses.append(loss.item())

# %%
parameters = [p.full_tensor() for p in model.parameters()]
