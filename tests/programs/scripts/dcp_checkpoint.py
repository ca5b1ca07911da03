"""In the form of PyTorch's DCP recipes: a Stateful state, saved, saved in the background,
loaded.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

CHECKPOINT_DIR = "checkpoint"


class AppState(Stateful):
    def __init__(self, model, optimizer=None):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        model, optimizer = state_dict["model"], state_dict["optim"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


def setup(seed):
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


# %%
dist.init_process_group("gloo")
model, optimizer = setup(0)

# %% steps
losses = []
torch.manual_seed(dist.get_rank())
for step in range(2):
    optimizer.zero_grad()
    loss = model(torch.rand(8, 16)).sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=f"{CHECKPOINT_DIR}/step{step}")

# %%
future = dcp.async_save({"app": AppState(model, optimizer)}, checkpoint_id=f"{CHECKPOINT_DIR}/last")
future.result()
other, other_optimizer = setup(1)
dcp.load({"app": AppState(other, other_optimizer)}, checkpoint_id=f"{CHECKPOINT_DIR}/last")
first, first_optimizer = setup(2)
dcp.load({"app": AppState(first, first_optimizer)}, checkpoint_id=f"{CHECKPOINT_DIR}/step0")
parameters = [p.full_tensor() for each in (model, other, first) for p in each.parameters()]
dist.destroy_process_group()
