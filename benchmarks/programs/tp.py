"""Tensor parallel: two pairs of a column-wise and a row-wise layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.manual_seed(0)
line = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(
    nn.Linear(256, 512),
    nn.ReLU(),
    nn.Linear(512, 256),
    nn.Linear(256, 512),
    nn.ReLU(),
    nn.Linear(512, 16),
)
plan = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "3": ColwiseParallel(),
    "5": RowwiseParallel(),
}
parallelize_module(model, line, plan)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
inputs, targets = torch.randn(64, 256), torch.randn(64, 16)


def step() -> None:
    """One step of training."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
