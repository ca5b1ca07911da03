"""What a broken step leaves in models is found and taken out, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cellmesh.workers.groups import model_reset


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Breaks(nn.Module):
    """Two layers between which a backward pass breaks, once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.first(x)
        if self.is_broken:
            between.register_hook(self._break)
        return self.second(between)

    def _break(self, grad: torch.Tensor) -> torch.Tensor:
        self.is_broken = False
        raise KeyboardInterrupt


def _reset() -> None:
    survey = model_reset.Survey()
    survey.reset(survey.half_done)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _steps_as(model: nn.Module, wanted: list[torch.Tensor]) -> bool:
    _step(model)
    return all(map(torch.equal, _grads(model), wanted))


def _has_grads(model: nn.Module) -> list[bool]:
    return [parameter.grad is not None for parameter in model.parameters()]


def _broken_step(model: nn.Module, inner: Breaks) -> None:
    inner.is_broken = True
    with pytest.raises(KeyboardInterrupt):
        _step(model)


def _sharded(inner: Breaks) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for module in (inner.first, inner.second, inner):
        fully_shard(module, mesh=mesh)
    return inner


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [
        parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad.clone()
        for parameter in model.parameters()
    ]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, _sharded])
def test_a_model_steps_on_after_a_broken_backward(wrap: Callable[[Breaks], nn.Module]) -> None:
    inner = Breaks()
    model = wrap(inner)
    _step(model)
    wanted = _grads(model)
    model.zero_grad()
    assert not model_reset.look_after_failure()
    _broken_step(model, inner)
    assert model_reset.look_after_failure()
    _reset()
    assert not model_reset.look_after_failure()
    assert not any(_has_grads(model))
    assert _steps_as(model, wanted)


def test_a_model_between_forward_and_backward_is_left_alone() -> None:
    inner = Breaks()
    model = DistributedDataParallel(inner)
    loss = model(torch.ones(2, 4)).sum()
    assert not model_reset.look_after_failure()
    _reset()
    loss.backward()
    assert all(_has_grads(model))


@pytest.mark.parametrize("begins", ["optimizer", "model"])
def test_fsdp_forgets_accumulated_gradients_after_a_failure(begins: str) -> None:
    model = fully_shard(Breaks(), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _step(model)
    wanted = _grads(model)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    _step(model)
    assert not model_reset.look_after_failure()  # the next cell may go on accumulating
    {"optimizer": optimizer, "model": model}[begins].zero_grad()
    model.set_requires_gradient_sync(True)
    assert _steps_as(model, wanted)


def test_a_model_that_cannot_be_reset_is_named_and_the_others_are_reset() -> None:
    odd, inner = DistributedDataParallel(nn.Linear(4, 4)), Breaks()
    model = DistributedDataParallel(inner)
    for each in (odd, model):
        _step(each)
    _broken_step(model, inner)
    survey = model_reset.Survey()
    odd._build_params_for_reducer = odd._comm_hooks = 3
    notes = survey.reset([*survey.half_done, *survey.progress])
    assert notes == (
        "gradients of the unfinished step are dropped (DDP)",
        "DDP could not be reset, construct it again (TypeError)",
    )
    assert not any(_has_grads(model))
