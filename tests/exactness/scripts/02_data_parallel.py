"""Digits with DDP, in the form of PyTorch's ImageNet example (torchrun --nproc-per-node 4)."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

DATA = Path(__file__).resolve().parents[3] / "notebooks" / "data" / "digits.npz"
EPOCHS = 6
BATCH = 16

losses: list[float] = []


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def load_digits() -> tuple[Subset, Subset]:
    """The digits to train on and those to validate with, split alike on all ranks."""
    with np.load(DATA) as archive:
        images = torch.from_numpy(archive["images"]).float().unsqueeze(1) / 16
        labels = torch.from_numpy(archive["labels"]).long()
    digits = TensorDataset(images, labels)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(digits, order[:1440]), Subset(digits, order[1440:])


@torch.no_grad()
def validate(model: DistributedDataParallel, loader: DataLoader, device: torch.device) -> float:
    """Top-1 accuracy over all ranks, in per cent."""
    for buffer in model.module.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    counts = torch.zeros(2, dtype=torch.long, device=device)
    for x, y in loader:
        hits = model.module(x.to(device)).argmax(1) == y.to(device)
        counts += torch.tensor([int(hits.sum()), len(y)], device=device)
    dist.all_reduce(counts)
    right, seen = counts.tolist()
    return 100 * right / seen


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, val_set = load_digits()
    sampler = DistributedSampler(train_set, seed=0)
    train_loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, pin_memory=has_gpu)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet().to(device), device_ids=[device] if has_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.2)

    best = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            model.train()
            for x, y in train_loader:
                loss = cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            scheduler.step()
            top1 = validate(model, val_loader, device)
            if rank == 0:
                print(f"epoch {epoch}: top-1 {top1:.1f} %")
                if top1 > best:
                    torch.save(model.module.state_dict(), Path(folder) / "best.pt")
            best = max(best, top1)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
