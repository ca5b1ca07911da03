"""In the form of PyTorch's tutorials: a compiled model in DDP, with `no_sync`, and a communication
hook.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

# %%
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
ddp_model = DDP(net)
if "--fp16" in sys.argv:
    ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)
compiled = torch.compile(ddp_model, backend="aot_eager")
optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)

# %% steps
losses = []
for i in range(3):
    torch.manual_seed(10 * i + dist.get_rank())
    optimizer.zero_grad()
    with ddp_model.no_sync():
        compiled(torch.randn(6, 8)).pow(2).mean().backward()
    loss = compiled(torch.randn(6, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
parameters = list(net.parameters())
dist.destroy_process_group()
