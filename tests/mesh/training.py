"""What the ranks run in `test_model_reset`: trainers of all kinds, and faults that strike them.

A trainer is made of a seed alone, so two of a kind compute the same; one is disturbed, the other is
not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

NUM_MICROBATCHES = 8
NUM_ACCUMULATED = 3
_WIDTH = 8

# Where a fault strikes next on this rank, and how many passes it lets by first.
_armed: dict[str, int] = {}
_trainers: dict[str, Any] = {}
_numbers = itertools.count()


class Struck(Exception):
    """What a fault raises."""


def reach(place: str) -> None:
    """A place where a fault may strike."""
    if place in _armed:
        _armed[place] -= 1
        if _armed[place] < 0:
            _armed.clear()
            raise Struck(place)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ahead: str, back: str) -> torch.Tensor:  # type: ignore[override]
        ctx.back = back
        reach(ahead)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        reach(ctx.back)
        return gradient, None, None


class Net(nn.Module):
    """Two layers; faults strike between them."""

    def __init__(self, seed: int, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            return self.second(checkpoint(self._between, x, use_reentrant=False)) + x
        return self.second(self._between(x)) + x

    def _between(self, x: torch.Tensor) -> torch.Tensor:
        return _reach(torch.tanh(self.first(x)), "forward", "backward")


@torch.compiler.disable
def _reach(x: torch.Tensor, ahead: str, back: str) -> torch.Tensor:
    return _Place.apply(x, ahead, back)


class Stage(Net):
    """Also struck where zero-bubble schedules compute the gradients of weights, apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _reach(self.first.weight, "", "weight")
        between = torch.tanh(nn.functional.linear(x, weight, self.first.bias))
        return self.second(_reach(between, "forward", "backward")) + x


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    reach("loss")
    return nn.functional.mse_loss(output, target)


def _batch(step: int, part: int = 0, size: int = 16) -> torch.Tensor:
    return torch.randn(size, _WIDTH, generator=torch.Generator().manual_seed(1000 * step + part))


class Pipeline:
    """A schedule of torch.distributed.pipelining over all ranks."""

    def __init__(self, name: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        schedule = getattr(pipelining, name)
        is_multi = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
        num_stages = 2 * size if is_multi else size
        is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        second = num_stages - 1 - rank if is_v else rank + size
        indices = (rank, second) if is_multi else (rank,)
        self.stages = [
            pipelining.PipelineStage(Stage(index), index, num_stages, torch.device("cpu"))
            for index in indices
        ]
        self.schedule = schedule(
            self.stages if is_multi else self.stages[0], NUM_MICROBATCHES, loss_fn=_loss
        )
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, 0.05, momentum=0.9)

    def step(self, number: int) -> list[Any]:
        self.optimizer.zero_grad()
        reach("before")
        losses: list[torch.Tensor] = []
        inputs = [_batch(number)] if any(stage.is_first for stage in self.stages) else []
        is_last = any(stage.is_last for stage in self.stages)
        out = self.schedule.step(
            *inputs, target=_batch(number, 1) if is_last else None, losses=losses
        )
        reach("after")
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters]).square()
        dist.all_reduce(norm)  # no rank steps before all are here
        self.optimizer.step()
        return [losses, out, norm]


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Trainer:
    """A model that is wrapped, and how it is stepped: with passes `without_sync`, or with one."""

    def __init__(
        self,
        wrap: Callable[[nn.Module], Any],
        is_checkpointed: bool = False,
        make_optimizer: Callable[[Any], Any] = _sgd,
        without_sync: Callable[[Any], Any] | None = None,
        is_scaled: bool = False,
        is_joined: bool = False,
    ) -> None:
        # Names of its own: a rank may still hold trainers from before, in tracebacks.
        prefix = next(_numbers)
        layers = {f"{prefix}_{seed}": Net(seed, is_checkpointed) for seed in range(3)}
        self.model = wrap(nn.Sequential(OrderedDict(layers)))
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.parameters)
        if self.optimizer is not None:
            self.optimizer.register_step_pre_hook(lambda *_: reach("optimizer"))
        self.without_sync = without_sync
        self.scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
        self.is_joined = is_joined

    def step(self, number: int) -> list[Any]:
        self.optimizer.zero_grad()
        with Join([self.model]) if self.is_joined else contextlib.nullcontext():
            return self._step(number)

    def _step(self, number: int) -> list[Any]:
        reach("before")
        losses = []
        num_passes = NUM_ACCUMULATED if self.without_sync else 1
        for index in range(num_passes):
            is_last = index == num_passes - 1
            with contextlib.nullcontext() if is_last else self.without_sync(self.model):
                x = _batch(number, dist.get_rank() + 10 * index)
                losses.append(_loss(self.model(x), x.flip(0)))
                self.scaler.scale(losses[-1]).backward()
        self.scaler.unscale_(self.optimizer)
        reach("after")
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        dist.barrier()  # no rank steps before all are here
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return [losses, norm, self.scaler.get_scale()]


class OwnReplicas(nn.Module):
    """A data-parallel class as programs write it: hooks of gradients fill a bucket and reduce it,
    and a callback at the end of the backward pass waits.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._is_queued, self._works = False, []  # type: ignore[var-annotated]
        self._accumulators = []
        for parameter in module.parameters():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(functools.partial(self._reduce, parameter))
            self._accumulators.append(node)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def _reduce(self, parameter: nn.Parameter, *unused: Any) -> None:
        self._works.append(dist.all_reduce(parameter.grad, async_op=True))
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self.reset()

    def reset(self) -> None:
        """Forget the pass."""
        self._is_queued, self._works = False, []


class InBackward(Trainer):
    """Its parameters are updated within the backward pass."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        super().__init__(wrap, make_optimizer=lambda parameters: None)

    def step(self, number: int) -> list[Any]:
        loss = _loss(self.model(_batch(number, dist.get_rank())), _batch(number, 5))
        loss.backward()
        return [loss, None]


def ddp(model: nn.Module, hook: str = "", **options: Any) -> Any:
    # Small buckets: a backward pass is struck when some have been reduced and some have not.
    made = DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005} | options)
    if hook == "fp16":
        made.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, min_compression_rate=0.1, use_error_feedback=True
        )
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return made


def fsdp1(model: nn.Module, **options: Any) -> Any:
    policy = ModuleWrapPolicy({Net})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )


def fsdp2(model: nn.Module, shape: tuple[int, ...] = (4,), prefetches: bool = False) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prefetches:
        for layer, following in zip(model, list(model)[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return model


@contextlib.contextmanager
def unsynced(model: Any) -> Iterator[None]:
    """A pass of FSDP2 that does not reduce gradients."""
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    yield
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)


def no_sync(model: Any) -> Any:
    return model.no_sync()


def compiled(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(wrap(model), backend="aot_eager")


# torch.distributed.optim warns when it is imported, which is an error in the tests' own process.


def zero(parameters: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.SGD, lr=0.05, momentum=0.9
    )


def with_hooks(model: nn.Module) -> Any:
    """FSDP2, with an optimizer for each parameter that steps when its gradient is there."""
    for parameter in fsdp2(model).parameters():
        optimizer = torch.optim.SGD([parameter], 0.05)
        parameter.register_post_accumulate_grad_hook(functools.partial(_step_of, optimizer))
    return model


def _step_of(optimizer: Any, parameter: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def make(make_trainer: Callable[[], Any]) -> None:
    """Make a trainer and its twin; those before are gone."""
    _trainers.clear()
    for name in ("trainer", "twin"):
        _trainers[name] = make_trainer()


def arm(place: str, num_skipped: int = 0) -> None:
    """Have a fault strike this rank at a place."""
    _armed[place] = num_skipped


def disarm() -> None:
    _armed.clear()


def steps(name: str, num_steps: int, first: int = 0) -> list[list[Any]]:
    """Some steps; what each has computed and the parameters after it, as plain values."""
    trainer = _trainers[name]
    return [
        [_plain(each) for each in [*trainer.step(number), *trainer.parameters]]
        for number in range(first, first + num_steps)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().numpy().tobytes().hex()
    return value
