"""In the form of pytorch/examples, distributed/FSDP2: `fully_shard` by layer, checkpoints by
DCP.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, num_layers=3, dim=8, vocab=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Checkpointer:
    def __init__(self, folder):
        self.folder = folder

    def save(self, model, optimizer):
        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=self.folder)

    def load(self, model, optimizer):
        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=self.folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)


def build():
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(
            layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        )
    fully_shard(model)
    for first, second in zip(model.layers, model.layers[1:], strict=False):
        first.set_modules_to_forward_prefetch([second])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


# %%
dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer = build()

# %% steps
losses = []
generator = torch.Generator().manual_seed(rank)
for _ in range(3):
    tokens = torch.randint(0, 16, (4, 6), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    losses.append(loss.item())

# %%
Checkpointer("checkpoint").save(model, optimizer)
model, optimizer = build()
model(tokens).sum().backward()
Checkpointer("checkpoint").load(model, optimizer)
parameters = [p.full_tensor() for p in model.parameters()]
dist.destroy_process_group()
