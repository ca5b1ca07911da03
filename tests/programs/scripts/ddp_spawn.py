"""In the form of PyTorch's DDP tutorial: `setup`, `cleanup`, processes by `mp.spawn`, a
checkpoint.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

losses = []


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ["PROGRAM_PORT"]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def demo_checkpoint(rank, world_size, path, queue):
    setup(rank, world_size)
    torch.manual_seed(rank)
    ddp_model = DDP(ToyModel())
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, weights_only=True))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp_model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    found += [p.sum().item() for p in ddp_model.parameters()]
    queue.put((rank, found))
    # A model that dies after its group is destroyed ends the group's threads under the
    # interpreter's lock, for which one of them may wait: torch hangs.
    del ddp_model
    cleanup()


def run_demo(demo_fn, world_size):
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            demo_fn, args=(world_size, f"{folder}/model.pt", queue), nprocs=world_size, join=True
        )
    return dict(queue.get() for _ in range(world_size))


# %% --ranks 0
if __name__ == "__main__":
    found = run_demo(demo_checkpoint, 2)
    losses = found[0] + found[1]
