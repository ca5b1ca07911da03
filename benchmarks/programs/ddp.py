"""DDP: an MLP whose gradients are averaged over all ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)
    )
)
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(64, 256), torch.randn(64, 16)


def step() -> None:
    """One step of training."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
