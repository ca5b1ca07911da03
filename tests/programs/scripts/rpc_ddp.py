"""In the form of PyTorch's tutorial on DDP with RPC: a dense layer on trainers, an embedding on a
server.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_TRAINERS = 2


class HybridModel(nn.Module):
    def __init__(self, remote_emb_module):
        super().__init__()
        self.remote_emb_module = remote_emb_module
        torch.manual_seed(0)
        self.fc = DDP(nn.Linear(6, 4), process_group=trainers)

    def forward(self, indices, offsets):
        return self.fc(self.remote_emb_module.forward(indices, offsets))


def _seed():
    torch.manual_seed(4)


def _run_trainer(remote_emb_module, rank):
    model = HybridModel(remote_emb_module)
    parameter_rrefs = model.remote_emb_module.remote_parameters()
    parameter_rrefs += [rpc.RRef(parameter) for parameter in model.fc.parameters()]
    opt = DistributedOptimizer(torch.optim.SGD, parameter_rrefs, lr=0.05)
    found = []
    for epoch in range(3):
        generator = torch.Generator().manual_seed(10 * epoch + rank)
        indices = torch.randint(0, 10, (8,), generator=generator)
        with dist_autograd.context() as context_id:
            output = model(indices, torch.tensor([0, 3]))
            loss = nn.functional.cross_entropy(output, torch.tensor([rank, 2]))
            dist_autograd.backward(context_id, [loss])
            dist.barrier(group=trainers)
            if rank == 0:
                opt.step(context_id)
            dist.barrier(group=trainers)
            found.append(loss.item())
    return found + [parameter.sum().item() for parameter in model.fc.parameters()]


# %%
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", rank=rank, world_size=4)
trainers = dist.new_group(list(range(NUM_TRAINERS)))
names = {2: "master", 3: "ps"}
rpc.init_rpc(names.get(rank, f"trainer{rank}"), rank=rank, world_size=4)

# %% steps
losses = []
if rank == 2:
    rpc.rpc_sync("ps", _seed)  # which makes the embedding
    emb = RemoteModule("ps", nn.EmbeddingBag, args=(10, 6), kwargs={"mode": "sum"})
    futures = [
        rpc.rpc_async(f"trainer{i}", _run_trainer, args=(emb, i)) for i in range(NUM_TRAINERS)
    ]
    losses = [value for future in futures for value in future.wait()]

# %%
rpc.shutdown()
