"""The models that the tests of healing step: one of each kind that holds process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.mesh.forked import Rank

KINDS = ("ddp", "fsdp", "tp", "dtensor", "pipeline")


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class _Crossed(nn.Module):
    """Its gradients come in another order than its parameters: DDP packs its buckets again."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(40, 8), nn.Linear(8, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Models:
    """Models on a mesh of dims ``dp`` and ``tp``; made on all ranks alike."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        mesh = rank.mesh
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(_Crossed(), bucket_cap_mb=0.004)
        self.fsdp = _mlp()
        for module in (self.fsdp[0], self.fsdp[2], self.fsdp):
            fully_shard(module, mesh=mesh["dp"])
        self.tp = parallelize_module(
            _mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Shard(1)])
        self.dtensor = nn.ParameterList([nn.Parameter(weight)])
        stage = PipelineStage(nn.Linear(8, 8), rank.rank, rank.world_size, torch.device("cpu"))
        self.pipeline = stage.submod
        self.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        self.optimizers = {
            kind: torch.optim.SGD(getattr(self, kind).parameters(), 0.01, momentum=0.9)
            for kind in KINDS
        }

    def _batch(self, step: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 * step + seed))

    def loss(self, kind: str, step: int) -> torch.Tensor:
        """The loss of a batch; forward only."""
        if kind in ("ddp", "fsdp"):
            return (getattr(self, kind)(self._batch(step, self.rank.rank)) ** 2).mean()
        if kind == "tp":
            return (self.tp(self._batch(step)) ** 2).mean()
        whole = self.dtensor[0].redistribute(self.rank.mesh, [Replicate(), Replicate()])
        return (whole.to_local() ** 2).mean()

    def backward(self, kind: str, step: int) -> float:
        """Forward and backward of a batch; the loss."""
        if kind != "pipeline":
            loss = self.loss(kind, step)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()
        losses: list[torch.Tensor] = []
        if self.rank.rank == 0:
            self.schedule.step(self._batch(step))
        elif self.rank.rank == self.rank.world_size - 1:
            self.schedule.step(target=torch.zeros(8, 8), losses=losses)
        else:
            self.schedule.step()
        return float(sum(loss.item() for loss in losses))

    def step(self, kind: str, step: int) -> float:
        """A training step; the loss."""
        # Plain modules: gradients of a broken step are the user's, as ever.
        if kind in ("tp", "dtensor"):
            self.optimizers[kind].zero_grad()
        loss = self.backward(kind, step)
        self.optimizers[kind].step()
        self.optimizers[kind].zero_grad()
        return loss

    def get_stuck(self, kind: str, step: int) -> None:
        """What the others do while a rank does not come: raises when it is released."""
        self.backward(kind, step)
        dist.barrier()
        raise AssertionError("nothing was waited for")
