"""In the form of pytorch/examples, fsdp_tp_example.py: TP and SP in one dim, FSDP2 over the
other.
"""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Transformer(nn.Module):
    def __init__(self, dim=8, vocab=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


# %%
tp_size = 2
dp_size = int(os.environ["WORLD_SIZE"]) // tp_size
device_mesh = init_device_mesh("cpu", (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
tp_mesh, dp_mesh = device_mesh["tp"], device_mesh["dp"]
torch.manual_seed(0)
model = Transformer()
model = parallelize_module(
    model,
    tp_mesh,
    {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
)
for layer in model.layers:
    parallelize_module(
        layer,
        tp_mesh,
        {
            "norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
sharded_model = fully_shard(model, mesh=dp_mesh)
optimizer = torch.optim.AdamW(sharded_model.parameters(), lr=3e-3, foreach=True)

# %% steps
losses = []
for i in range(3):
    torch.manual_seed(i + dp_mesh.get_local_rank())
    tokens = torch.randint(12, (4, 6))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(sharded_model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
parameters = [p.full_tensor() for p in sharded_model.parameters()]
