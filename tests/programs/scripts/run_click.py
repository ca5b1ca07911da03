"""A script that a person has and runs as it is: click, which ends the interpreter by itself."""

import click
import torch
import torch.distributed as dist
from torch import nn

losses: list[float] = []


@click.command()
@click.option("--steps", default=1)
@click.option("--lr", default=0.5)
def main(steps, lr):
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= lr * parameter.grad
            parameter.grad = None
        losses.append(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
