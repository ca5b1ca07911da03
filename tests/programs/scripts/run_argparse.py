"""A script that a person has and runs as it is: argparse, `main`, and `sys.exit` of its status."""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

losses: list[float] = []
parameters: list[torch.Tensor] = []


def train(args):
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters.extend(model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
