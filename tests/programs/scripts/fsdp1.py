"""In the form of pytorch/examples, distributed/FSDP: FSDP1 with a policy, a scheduler, a
checkpoint.
"""

import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.fc1 = nn.Linear(4 * 6 * 6, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def train(model, rank, optimizer, epoch):
    model.train()
    generator = torch.Generator().manual_seed(10 * epoch + rank)
    ddp_loss = torch.zeros(2)
    for _ in range(2):
        data, target = torch.randn(4, 1, 8, 8, generator=generator), torch.arange(4)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target, reduction="sum")
        loss.backward()
        optimizer.step()
        ddp_loss += torch.tensor([loss.item(), len(data)])
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    return (ddp_loss[0] / ddp_loss[1]).item()


def save_and_load(model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id="checkpoint")
        dcp.load(state, checkpoint_id="checkpoint")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))


# %%
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

# %% steps
losses = []
for epoch in range(2):
    losses.append(train(model, rank, optimizer, epoch))
    scheduler.step()

# %%
save_and_load(model, optimizer)
losses.append(train(model, rank, optimizer, 5))
parameters = list(model.parameters())
dist.destroy_process_group()
