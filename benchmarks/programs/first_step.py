"""From nothing to a result: an MLP sharded over all ranks by FSDP2, one step, and its loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not dist.is_initialized():  # it is on a mesh
    dist.init_process_group("gloo")
torch.manual_seed(0)
shards = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=shards)
optimizer = torch.optim.AdamW(model.parameters())
result = model(torch.randn(32, 64)).square().mean()
result.backward()
optimizer.step()
loss = result.item()
if dist.get_rank() == 0:
    print("loss", loss, flush=True)
