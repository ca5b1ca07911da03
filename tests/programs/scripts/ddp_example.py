"""In the form of pytorch/examples, distributed/ddp/example.py: one `main`, torchrun's
environment.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

losses: list[float] = []
parameters: list[torch.Tensor] = []


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic():
    print(f"[{os.getpid()}] rank = {dist.get_rank()}, world_size = {dist.get_world_size()}")
    torch.manual_seed(0)
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters[:] = ddp_model.parameters()


def spmd_main():
    env_dict = {
        key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    }
    print(f"[{os.getpid()}] Initializing process group with: {sorted(env_dict)}")
    dist.init_process_group(backend="gloo")
    losses.clear()
    demo_basic()
    dist.destroy_process_group()


# %% steps
if __name__ == "__main__":
    spmd_main()
