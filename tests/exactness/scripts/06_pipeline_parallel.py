"""Data x tensor x pipeline parallel training of a small transformer: the loop of notebook 06 for
torchrun.

torchrun --nproc-per-node 8 06_pipeline_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, SEQ, BLOCKS, BATCH, MICROBATCHES, STEPS = 32, 32, 4, 16, 4, 16, 4, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            w(y).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer() -> nn.Sequential:
    blocks = [Block() for _ in range(BLOCKS)]
    ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, *ends)


def parallelize(part: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    plan = {
        "q": ColwiseParallel(),
        "k": ColwiseParallel(),
        "v": ColwiseParallel(),
        "out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for module in part:
        if isinstance(module, Block):
            parallelize_module(module, mesh["tp"], plan)
            fully_shard(module, mesh=mesh["dp"])
    return fully_shard(part, mesh=mesh["dp"])


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step: int, followers: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    text = [torch.randint(VOCAB, (BATCH,), generator=generator)]
    for choice in torch.randint(2, (SEQ, BATCH), generator=generator):
        text.append(followers[text[-1], choice])
    return torch.stack(text, dim=1)


def train(device: torch.device) -> list[float]:
    """Train; the losses, which the last stage tells the others."""
    mesh = init_device_mesh(device.type, (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    pp_rank, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    pp_group, dp_group = mesh["pp"].get_group(), mesh["dp"].get_group()

    torch.manual_seed(4)
    layers = transformer().to(device)
    half = len(layers) // 2
    part = parallelize(layers[:half] if pp_rank == 0 else layers[half:], mesh)
    stage = PipelineStage(part, pp_rank, 2, device, group=pp_group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.02, foreach=False)

    followers = torch.randint(VOCAB, (VOCAB, 2), generator=torch.Generator().manual_seed(5))
    losses = []
    for step in range(STEPS):
        mine = batch_of(step, followers).to(device).chunk(2)[dp_rank]
        loss = torch.zeros((), device=device)
        if stage.is_last:
            microbatch_losses: list[torch.Tensor] = []
            schedule.step(target=mine[:, 1:], losses=microbatch_losses)
            loss = torch.stack(microbatch_losses).mean().detach()
            dist.all_reduce(loss, group=dp_group)
        else:
            schedule.step(mine[:, :-1])
        dist.broadcast(loss, group=pp_group, group_src=1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / 2)
        if step % 5 == 4 and dist.get_rank() == 0:
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
