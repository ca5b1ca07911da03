"""FSDP2 x tensor parallel training of a small transformer: the loop of notebook 05 as a script for
torchrun.

torchrun --nproc-per-node 4 05_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

VOCAB, DIM, HEADS, HIDDEN, BLOCKS, SEQ, BATCH, STEPS = 64, 32, 4, 128, 2, 32, 16, 40


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split_heads(w(x)) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, DIM // HEADS)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(DIM), Attention()
        self.ffn_norm, self.ffn = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model.blocks:
        plan = {
            "attn_norm": SequenceParallel(),
            "attn": gather,
            "attn.wq": ColwiseParallel(),
            "attn.wk": ColwiseParallel(),
            "attn.wv": ColwiseParallel(),
            "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "ffn": gather,
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh["tp"], ends)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def batch_of(step: int, followers: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    text = [torch.randint(VOCAB, (BATCH,), generator=generator)]
    for choice in torch.randint(4, (SEQ, BATCH), generator=generator):
        text.append(followers[text[-1], choice])
    return torch.stack(text, dim=1)


def train(device: torch.device) -> list[float]:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(2)
    model = parallelize(Transformer().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    followers = torch.randint(VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(3))
    losses = []
    for step in range(STEPS):
        batch = batch_of(step, followers).to(device)
        mine = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        logits = model(mine[:, :-1])
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().full_tensor()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        losses.append(mean.item() / mesh["dp"].size())
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


dist.init_process_group()
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
losses = train(device)
dist.destroy_process_group()
