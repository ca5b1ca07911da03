"""NCCL groups are healed in place. Needs two GPUs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cellmesh.workers.groups.group_factory import choose_placement
from tests.mesh.forked import Rank, World, released_after

from .conftest import needs_gpus

NUM_HEALS = 5

pytestmark = [pytest.mark.gpu, needs_gpus(2)]


def _train(rank: Rank, disturbed: bool) -> list[float]:
    assert dist.get_backend() == "cpu:gloo,cuda:nccl" or "nccl" in str(dist.get_backend_config())
    device = torch.device("cuda", rank.rank)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8, device=device), device_ids=[rank.rank])
    fsdp = torch.nn.Linear(8, 8, device=device)
    fully_shard(fsdp, mesh=rank.mesh)
    losses = []

    def step(model: torch.nn.Module) -> float:
        loss = (model(torch.full((4, 8), rank.rank + 1.0, device=device)) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
        return loss.item()

    for number in range(NUM_HEALS):
        losses += [step(ddp), step(fsdp)]
        if disturbed:
            if rank.rank != number % 2:
                with released_after(rank.groups, 1.0):
                    # An aborted operation may raise or end; either way it ends.
                    try:
                        dist.all_reduce(torch.ones(1, device=device))
                        torch.cuda.synchronize()
                    except RuntimeError:
                        pass
            rank.groups.heal(number + 1, frozenset({0, 1}))
    return losses


def test_models_on_nccl_step_on_after_heals() -> None:
    assert choose_placement("auto", 0, 2, 2).backend == "cpu:gloo,cuda:nccl"
    results = []
    for disturbed in (False, True):
        with World(2, num_gpus=2) as world:
            results.append(
                world.run(lambda rank, disturbed=disturbed: _train(rank, disturbed), 120)
            )
    assert results[0] == results[1]
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") is None  # only ranks have it
