"""Uneven inputs, a sharded optimizer, float16 gradients, post-local SGD (torchrun --nproc-per-node
4).
"""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

DATA = Path(__file__).resolve().parents[3] / "notebooks" / "data" / "digits.npz"
BATCH = 32
WARM_UP, PERIOD = 8, 6

Batch = tuple[torch.Tensor, torch.Tensor]

losses: list[float] = []


def load_share(device: torch.device) -> list[Batch]:
    """This rank's share of the digits, in batches."""
    with np.load(DATA) as archive:
        images = torch.from_numpy(archive["images"]).float().flatten(1) / 16
        labels = torch.from_numpy(archive["labels"]).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    share = order[dist.get_rank() :: dist.get_world_size()][: 14 * BATCH]
    return [(images[chosen].to(device), labels[chosen].to(device)) for chosen in share.split(BATCH)]


def build(device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(0)
    hidden = [
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
    ]
    model = nn.Sequential(*hidden, nn.Linear(128, 10))
    return DistributedDataParallel(
        model.to(device), device_ids=[device] if device.type == "cuda" else None
    )


def step(model: DistributedDataParallel, optimizer: Optimizer, batch: Batch) -> None:
    x, y = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    batches = load_share(device)
    uneven = batches[: 6 + 2 * dist.get_rank()]

    model = build(device)
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for batch in uneven:
            step(model, optimizer, batch)

    model = build(device)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for batch in batches * 2:
        step(model, zero, batch)

    model = build(device)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    with Join([model, zero]):
        for batch in uneven:
            step(model, zero, batch)

    model = build(device)
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches * 2:
        step(model, optimizer, batch)

    model = build(device)
    pair, _ = dist.new_subgroups(group_size=2)
    model.register_comm_hook(PostLocalSGDState(None, pair, WARM_UP), post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    for number in range(38):
        step(model, optimizer, batches[number % len(batches)])

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
