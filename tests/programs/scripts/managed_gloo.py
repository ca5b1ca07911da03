"""In the form of torchft: a manager that makes a gloo group of its own for each quorum, over a
client of the store, and averages gradients by futures of that group.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


class Manager:
    def __init__(self, model, optimizer):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.model, self.optimizer, self.group = model, optimizer, None
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )

    def start_quorum(self):
        """Those who take part agree on a number, and connect under it."""
        number = [self.store.add("quorum", 1) if self.rank == 0 else 0]
        dist.broadcast_object_list(number)
        self.configure(dist.PrefixStore(f"quorum/{number[0]}", self.store))

    def configure(self, store):
        backend = dist.ProcessGroupGloo(
            store, self.rank, self.world_size, timeout=timedelta(seconds=60)
        )
        self.group = dist.ProcessGroup(store, self.rank, self.world_size)
        self.group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.group._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
        )

    def allreduce(self, tensor):
        work = self.group.allreduce([tensor])
        return work.get_future().then(lambda future: future.value()[0].div_(self.world_size))

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        futures = [self.allreduce(parameter.grad) for parameter in self.model.parameters()]
        for future in futures:
            future.wait()
        self.optimizer.step()


# %%
dist.init_process_group("gloo")
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
manager = Manager(model, torch.optim.AdamW(model.parameters(), lr=0.02))

# %% steps
losses = []
manager.start_quorum()
for step in range(3):
    torch.manual_seed(10 * step + manager.rank)
    loss = nn.functional.cross_entropy(model(torch.randn(9, 6)), torch.randint(2, (9,)))
    manager.step(loss)
    losses.append(loss.item())

# %%
parameters = list(model.parameters())
dist.destroy_process_group()
