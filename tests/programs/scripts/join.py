"""In the form of PyTorch's tutorial on Join: ranks with unequal numbers of batches, DDP and
ZeRO.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer as ZeRO
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_INPUTS = 3

# %%
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 3))
optim = ZeRO(model.parameters(), torch.optim.Adam, lr=0.01)

# %% steps
losses = []
inputs = [torch.full((2, 4), float(i + 1)) for i in range(NUM_INPUTS + rank)]
with Join([model, optim]):
    for x in inputs:
        optim.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        optim.step()
        losses.append(loss.item())

# %%
parameters = list(model.parameters())
dist.destroy_process_group()
