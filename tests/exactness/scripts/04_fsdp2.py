"""FSDP2 training of a small transformer with checkpoints: the loop of notebook 04 as a script for
torchrun.

torchrun --nproc-per-node 4 04_fsdp2.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

DIM, HEADS, BLOCKS, SEQ, BATCH, STEPS, SAVED_AT = 64, 4, 3, 32, 16, 31, 16

text = Path("data/alice.txt").read_text()[1000:21000]
letters = sorted(set(text))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(letters), DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, len(letters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, 1))


def main() -> list[float]:
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    numbers = torch.tensor([letters.index(letter) for letter in text], device=device)

    torch.manual_seed(0)
    model = Transformer().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(numbers) - SEQ, (BATCH,), generator=generator)[rank::world_size]
        windows = torch.stack([numbers[start : start + SEQ + 1] for start in starts])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).float(), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    def state() -> dict:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    losses = [train(step) for step in range(SAVED_AT)]
    # As after a crash: what came after the checkpoint is done once more.
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        dcp.save(state(), checkpoint_id=folders[0])
        train(SAVED_AT)
        restored = state()
        dcp.load(restored, checkpoint_id=folders[0])
        dist.barrier()
    set_state_dict(
        model, optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optimizer"]
    )
    losses += [train(step) for step in range(SAVED_AT, STEPS)]
    dist.destroy_process_group()
    return losses


losses = main()
