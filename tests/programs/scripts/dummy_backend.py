"""In the form of PyTorch's tutorial on custom backends: a dummy backend, registered by the program,
that sums through the store, and a step that averages gradients with it.
"""

import time

import torch
import torch.distributed as dist
from torch import nn


class DummyWork(dist.Work):
    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def wait(self, timeout=None):
        self.finish()
        return True


class DummyBackend(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.own_rank, self.num_ranks, self.count = store, rank, size, 0

    def getBackendName(self):
        return "dummy"

    def allreduce(self, tensors, opts=None):
        self.count += 1
        tensor, prefix = tensors[0], str(self.count)

        def finish():
            self.store.set(f"{prefix}/{self.own_rank}", str(tensor.double().tolist()))
            keys = [f"{prefix}/{rank}" for rank in range(self.num_ranks)]
            while not self.store.check(keys):
                time.sleep(0.001)
            parts = [torch.tensor(eval(self.store.get(key))).double() for key in keys]
            tensor.copy_(sum(parts))

        return DummyWork(finish)


def create(store, rank, size, timeout):
    return DummyBackend(store, rank, size, timeout)


# %%
dist.init_process_group("gloo")
if "dummy" not in dist.Backend.backend_list:
    dist.Backend.register_backend("dummy", create, devices=["cpu"])
group = dist.new_group(backend="dummy")
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# %% steps
losses = []
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(8, 5)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    losses.append(loss.item())

# %%
parameters = list(model.parameters())
dist.destroy_process_group()
