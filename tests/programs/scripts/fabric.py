"""In the form of Fabric's examples: `launch`, `setup`, `backward`, `no_backward_sync`, `save`,
`load`.
"""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# %%
fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(3)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
data = TensorDataset(torch.randn(24, 6), torch.randn(24, 2))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=3))

# %% steps
losses = []
for step, (x, y) in enumerate(loader):
    is_accumulating = step % 2 == 0
    if is_accumulating:
        optimizer.zero_grad()
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
    if not is_accumulating:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    losses.append(fabric.all_reduce(loss.detach()).item())

# %%
fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer})
fabric.barrier()
fabric.load("checkpoint.ckpt", {"model": model, "optimizer": optimizer})
parameters = list(model.parameters())
