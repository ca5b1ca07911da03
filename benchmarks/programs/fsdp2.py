"""FSDP2: transformer layers, each sharded over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
shards = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(
    *(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))
)
for layer in model:
    fully_shard(layer, mesh=shards)
fully_shard(model, mesh=shards)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
inputs, targets = torch.randn(8, 32, 64), torch.randn(8, 32, 64)


def step() -> None:
    """One step of training."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
