"""In the form of PyTorch's ZeRO recipe: the same model under Adam and under ZeRO's shards of it."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def example(use_zero):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(12, 12) for _ in range(5)])
    ddp_model = DDP(model)
    if use_zero:
        optimizer = ZeroRedundancyOptimizer(
            ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
        )
    else:
        optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)
    return ddp_model, optimizer


# %%
dist.init_process_group("gloo")
models = [example(True), example(False)]

# %% steps
losses, parameters = [], []
for ddp_model, optimizer in models:
    for i in range(2):
        torch.manual_seed(i + dist.get_rank())
        optimizer.zero_grad()
        loss = F.mse_loss(ddp_model(torch.randn(20, 12)), torch.randn(20, 12))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

# %%
sharded = models[0][1]
sharded.consolidate_state_dict(to=0)
if dist.get_rank() == 0:
    parameters += [state["exp_avg"] for state in sharded.state_dict()["state"].values()]
for ddp_model, _ in models:
    parameters += list(ddp_model.parameters())
dist.destroy_process_group()
