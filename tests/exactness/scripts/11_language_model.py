"""A small Llama that learns to write from one book, in 3-D (FSDP2 x TP x PP) on 8 ranks: notebook
11 by hand.

torchrun --nproc-per-node 8 11_language_model.py [CHECKPOINT]
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
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

BOOK = Path(__file__).resolve().parents[3] / "notebooks" / "data" / "alice.txt"
NUM_STEPS = int(os.environ.get("NOTEBOOK_STEPS", "300"))
NUM_WARMUP_STEPS = max(1, NUM_STEPS // 10)
SEQUENCES_PER_STEP, NUM_MICROBATCHES = 64, 2
PEAK_LEARNING_RATE, MAX_NORM = 8e-3, 1.0
CONTEXT = 64


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    context: int
    dim: int = 128
    hidden_dim: int = 384
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.num_heads
        kv_dim = sizes.num_kv_heads * self.head_dim
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.num_layers)})
        self.norm = nn.RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        head_dim = sizes.dim // sizes.num_heads
        frequencies = 10_000 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(sizes.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x, self.cos, self.sin)
        return x if self.output is None else self.output(self.norm(x))


def cut(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """This rank's part of a model: its stage, and of that its share over `tp` and `dp`."""
    stage, num_stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    num_layers = len(model.layers)
    for i in range(num_layers):
        if i * num_stages // num_layers != stage:
            del model.layers[str(i)]
    plan = {}
    if stage == 0:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    else:
        model.tok_embeddings = None
    if stage == num_stages - 1:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        )
    else:
        model.norm = model.output = None
    for i in model.layers:
        plan |= {
            f"layers.{i}.attention_norm": SequenceParallel(),
            f"layers.{i}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            f"layers.{i}.attention.wq": ColwiseParallel(),
            f"layers.{i}.attention.wk": ColwiseParallel(),
            f"layers.{i}.attention.wv": ColwiseParallel(),
            f"layers.{i}.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            f"layers.{i}.ffn_norm": SequenceParallel(),
            f"layers.{i}.feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            f"layers.{i}.feed_forward.w1": ColwiseParallel(),
            f"layers.{i}.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            f"layers.{i}.feed_forward.w3": ColwiseParallel(),
        }
    parallelize_module(model, mesh["tp"], plan)
    for i, block in model.layers.items():
        model.layers[i] = fully_shard(
            checkpoint_wrapper(block), mesh=mesh["dp"], reshard_after_forward=False
        )
    return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)


def batch(codes: torch.Tensor, step: int, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(codes) - CONTEXT, (SEQUENCES_PER_STEP,), generator=generator)
    mine = starts.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    windows = codes[mine[:, None] + torch.arange(CONTEXT + 1)].to(mesh.device_type)
    return windows[:, :-1], windows[:, 1:]


def learning_rate_factor(step: int) -> float:
    if step < NUM_WARMUP_STEPS:
        return (step + 1) / NUM_WARMUP_STEPS
    done = (step - NUM_WARMUP_STEPS) / max(1, NUM_STEPS - NUM_WARMUP_STEPS)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))


def loss_function(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def clip_gradients(parameters: list[nn.Parameter], pp_group: dist.ProcessGroup) -> None:
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]).full_tensor()
    squared = norm.square()
    dist.all_reduce(squared, group=pp_group)
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, squared.sqrt())


def main() -> list[float]:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh["dp", "tp"]._flatten()
    dp_group, pp_group = mesh.get_group("dp"), mesh.get_group("pp")
    stage, num_stages = mesh.get_local_rank("pp"), mesh["pp"].size()

    text = BOOK.read_text(encoding="utf-8")
    code_of = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([code_of[character] for character in text])

    torch.manual_seed(0)
    model = cut(Transformer(Sizes(vocabulary=len(code_of), context=CONTEXT)).to(device), mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    lr_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    pipeline = Schedule1F1B(
        PipelineStage(model, stage, num_stages, device, group=pp_group),
        NUM_MICROBATCHES,
        loss_fn=loss_function,
    )

    losses = []
    for step in range(NUM_STEPS):
        inputs, targets = batch(codes, step, mesh)
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        with loss_parallel():
            if stage == num_stages - 1:
                microbatch_losses = []
                pipeline.step(target=targets, losses=microbatch_losses)
                loss += (
                    sum(one.detach().full_tensor() for one in microbatch_losses) / NUM_MICROBATCHES
                )
            else:
                pipeline.step(inputs)
        clip_gradients(parameters, pp_group)
        optimizer.step()
        lr_schedule.step()
        dist.all_reduce(loss, group=dp_group)
        dist.broadcast(loss, group=pp_group, group_src=num_stages - 1)
        losses.append(loss.item() / mesh["dp"].size())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

    if len(sys.argv) > 1:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=sys.argv[1])
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    losses = main()
