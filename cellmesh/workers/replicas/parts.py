"""Finds tensors and plain values inside models, optimizers and containers, and the ranks that
should hold equal tensors and values.

These ranks are derived from local information: DistributedDataParallel's group, a DTensor's mesh
and placements. No collective is run, as groups may be broken at that time.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import MeshUsageError
from ...wire.replicas import Entry, Kind
from ..rank.value_transfer import is_dtensor

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OWN_STATISTICS = "running statistics are each rank's own"
_DDP_COPIES = "DistributedDataParallel copies its rank 0's before each forward"
_OWN_NUMBERS = "each rank draws random numbers of its own"
_PLAIN = (bool, int, float, complex, str, type(None))
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Holders:
    """The ranks that should hold equal values of one tensor, as its DeviceMesh or the model's
    wrapper (DDP, FSDP) implies.

    Args:
        ranks: global ranks, in corresponding order for all sets of replicas. () for all ranks.
        find_groups: returns process groups; a value that is broadcast over one after the other
            reaches all of `ranks`.
    """

    ranks: tuple[int, ...]
    find_groups: Callable[[], list[Any]]


EVERYONE = Holders((), lambda: [dist.group.WORLD])


def _only_here() -> Holders:
    return Holders((dist.get_rank() if dist.is_initialized() else 0,), list)


@dataclass(frozen=True)
class ModelPart:
    """One tensor or plain value of a model, optimizer or container, with its path and the ranks
    that should hold an equal one.

    Args:
        path: path of the part in the value.
        kind: kind of the part.
        value: the tensor (a DTensor as a whole), or the plain value.
        holders: ranks that should hold an equal one.
        why_differs: why it may differ between them; "" if it must not.
        replace: puts another value in its place; None for tensors, which are written in place.
        in_state: whether it belongs to an optimizer's state of a parameter, which may be missing.
    """

    path: str
    kind: Kind
    value: Any
    holders: Holders
    why_differs: str = ""
    replace: Callable[[Any], None] | None = None
    in_state: bool = False

    def local(self) -> torch.Tensor:
        """Return the rank's own part of a tensor, without autograd; shares the tensor's memory."""
        detached: torch.Tensor = self.value.detach()
        return detached.to_local() if is_dtensor(detached) else detached


@dataclass(frozen=True)
class StateSlot:
    """An optimizer and one of its parameters, for which the optimizer may hold state, with the
    state's path.
    """

    path: str
    optimizer: Optimizer
    parameter: torch.Tensor
    holders: Holders


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a module contains DDP, FSDP or DTensors (tensor parallel), which define the
    ranks that hold replicas.
    """
    return any(
        isinstance(m, DistributedDataParallel) or _is_fsdp1(m) for m in module.modules()
    ) or any(is_dtensor(p) for p in module.parameters())


class Walk:
    """Finds the tensors and plain values in models, optimizers and containers, each once.

    Args:
        namespace: namespace of the rank; its models name the parts of optimizer state.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.slots: list[StateSlot] = []
        self._known: dict[int, ModelPart] = {}  # id of a parameter or buffer -> part of its model
        self._seen: set[int] = set()
        modules = [
            (n, v)
            for n, v in namespace.items()
            if isinstance(v, nn.Module) and not n.startswith("_")
        ]
        for name, module in sorted(
            modules, key=lambda pair: not is_wrapped(pair[1])
        ):  # wrapped ones first
            self._learn(name, module)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is a DTensor or belongs to a DDP, FSDP or tensor-parallel
        model.
        """
        known = self._known.get(id(parameter))
        return is_dtensor(parameter) or (known is not None and known.holders is not EVERYONE)

    def _learn(self, path: str, module: nn.Module) -> None:
        for part in _of_module(module, path):
            self._known.setdefault(id(part.value), part)

    def parts(
        self,
        value: Any,
        path: str,
        replace: Callable[[Any], None] | None = None,
        holders: Holders = EVERYONE,
        kind: Kind = "tensor",
        depth: int = 0,
    ) -> Iterator[ModelPart]:
        """Yield each tensor, plain value and random generator found in a value as a `ModelPart`,
        each object once.

        Args:
            value: a tensor, model, optimizer, generator or number, or an object that holds them.
            path: name of the value.
            replace: puts another value in its place; None if it must not be replaced.
            holders, kind: holders and kind of parts whose own are not known otherwise.
            depth: number of containers around the value.
        """
        if _is_plain(value):
            if replace is not None:  # None for a number in an object of the user
                yield ModelPart(path, "number", value, holders, replace=replace)
            return
        if id(value) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield self._of_tensor(value, path, holders, kind)
        elif isinstance(value, nn.Module):
            self._learn(path, value)
            for part in _of_module(value, path):
                if id(part.value) not in self._seen:
                    self._seen.add(id(part.value))
                    yield self._of_tensor(
                        part.value, part.path, part.holders, part.kind, part.why_differs
                    )
        elif isinstance(value, Optimizer):
            yield from self._of_optimizer(value, path, depth)
        elif isinstance(value, torch.Generator):
            yield _generator(path, value.get_state, value.set_state)
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in list(items):
                put = _setter(value, key) if replace is not None else None
                yield from self.parts(item, f"{path}[{key!r}]", put, holders, kind, depth + 1)
        elif type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
            if value.flags.writeable and value.dtype.kind in "biufc" and value.ndim:
                yield ModelPart(path, kind, torch.as_tensor(value), holders)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            # In objects of the user, only tensors, models and optimizers count: a number may well
            # be different on each rank.
            counts = isinstance(value, LRScheduler | torch.amp.GradScaler)
            for name, item in list(vars(value).items()):
                put = functools.partial(setattr, value, name) if counts else None
                yield from self.parts(item, f"{path}.{name}", put, holders, kind, depth + 1)

    def _of_tensor(
        self, tensor: torch.Tensor, path: str, holders: Holders, kind: Kind, why_differs: str = ""
    ) -> ModelPart:
        known = self._known.get(id(tensor))
        if known is not None and known.holders is not EVERYONE:
            return ModelPart(path, known.kind, tensor, known.holders, known.why_differs)
        return ModelPart(path, kind, tensor, _holders_of(tensor, holders), why_differs)

    def _of_optimizer(self, optimizer: Optimizer, path: str, depth: int) -> Iterator[ModelPart]:
        # ZeroRedundancyOptimizer keeps each state on one rank only.
        has_state = type(optimizer).__name__ != "ZeroRedundancyOptimizer"
        for group_index, group in enumerate(optimizer.param_groups):
            for key, value in list(group.items()):
                if key != "params":
                    name = f"{path}.param_groups[{group_index}].{key}"
                    put = _setter(group, key)
                    yield from self.parts(value, name, put, EVERYONE, "optimizer state", depth + 1)
            for index, parameter in enumerate(group["params"] if has_state else ()):
                known = self._known.get(id(parameter))
                name = known.path if known else f"param_groups[{group_index}].params[{index}]"
                holders = known.holders if known else _holders_of(parameter, EVERYONE)
                slot = StateSlot(f"{path}.state[{name}]", optimizer, parameter, holders)
                self.slots.append(slot)
                yield from self._of_slot(slot, depth)

    def _of_slot(self, slot: StateSlot, depth: int) -> Iterator[ModelPart]:
        # Step counts and the like are equal on all ranks of the mesh on which the parameter is
        # sharded.
        common = (
            _on_mesh(slot.parameter.device_mesh) if is_dtensor(slot.parameter) else slot.holders
        )
        state = slot.optimizer.state.get(slot.parameter) or {}
        for key, value in list(state.items()):
            put = _setter(state, key)
            for part in self.parts(
                value, f"{slot.path}.{key}", put, common, "optimizer state", depth + 1
            ):
                yield dataclasses.replace(part, in_state=True)


def rng_parts(why_differs: str = _OWN_NUMBERS) -> Iterator[ModelPart]:
    """Yield the states of this process's random generators.

    Args:
        why_differs: why they may differ between ranks; "" if they must not.
    """
    generators: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "rng.torch": (torch.get_rng_state, torch.set_rng_state),
        "rng.python": (random.getstate, random.setstate),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators["rng.cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        generators["rng.numpy"] = numpy_random.get_state, numpy_random.set_state
    for path, (get, put) in generators.items():
        yield _generator(path, get, put, why_differs)


def _generator(
    path: str, get: Callable[[], Any], put: Callable[[Any], Any], why_differs: str = ""
) -> ModelPart:
    state = get()
    if not isinstance(state, torch.Tensor):
        return ModelPart(
            path, "rng", pickle.dumps(state), EVERYONE, why_differs, lambda s: put(pickle.loads(s))
        )
    return ModelPart(
        *(path, "rng", state.numpy().tobytes(), EVERYONE, why_differs),
        lambda data: put(torch.frombuffer(bytearray(data), dtype=torch.uint8)),
    )


def _of_module(module: nn.Module, path: str) -> Iterator[ModelPart]:
    """Yield a module's parameters and buffers, each once, in the module's order."""
    meshes = [p.device_mesh for p in module.parameters() if is_dtensor(p)]
    # Plain tensors beside tensor-parallel layers (norms, biases) are shared by all ranks of the
    # layers' mesh.
    common = _on_mesh(max(meshes, key=lambda mesh: mesh.size())) if meshes else EVERYONE
    yield from _of_submodule(module, path, common, frozenset(), "", set())


def _of_submodule(
    module: nn.Module,
    path: str,
    holders: Holders,
    ignored: frozenset[int],
    why_buffers: str,
    seen: set[int],
) -> Iterator[ModelPart]:
    if isinstance(module, DistributedDataParallel):
        holders = _on_group(module.process_group)
        skipped = module.parameters_to_ignore
        named = [*module.module.named_parameters(), *module.module.named_buffers()]
        ignored |= {id(tensor) for name, tensor in named if name in skipped}
        # Named `broadcast_buffers` until torch 2.12.
        copies = getattr(module, "forward_sync_buffers", None)
        why_buffers = (
            _DDP_COPIES if (module.broadcast_buffers if copies is None else copies) else ""
        )
    elif _is_fsdp1(module):
        holders = _only_here()  # flat parameters: each rank has its own piece
    own_statistics = isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm)
    kinds: tuple[tuple[Kind, Any], ...] = (
        ("parameter", module._parameters),
        ("buffer", module._buffers),
    )
    for kind, name, tensor in [(kind, n, t) for kind, held in kinds for n, t in held.items()]:
        if tensor is None:
            continue
        is_own = own_statistics and name in _STATISTICS
        why_differs = why_buffers or (_OWN_STATISTICS if is_own else "") if kind == "buffer" else ""
        who = _only_here() if id(tensor) in ignored else _holders_of(tensor, holders)
        yield ModelPart(f"{path}.{name}", kind, tensor, who, why_differs)
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from _of_submodule(child, f"{path}.{name}", holders, ignored, why_buffers, seen)


def _holders_of(tensor: torch.Tensor, holders: Holders) -> Holders:
    """Return the ranks that should hold the same part of a DTensor, by its placements; for any
    other tensor, return `holders`.
    """
    if not is_dtensor(tensor):
        return holders
    mesh = tensor.device_mesh
    replicated = [
        dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()
    ]
    return _on_mesh(mesh, replicated)


def _on_mesh(mesh: Any, dims: list[int] | None = None) -> Holders:
    """Return the ranks of a DeviceMesh whose coordinates equal this rank's in all dims except
    `dims` (None: all ranks of the mesh).
    """
    wanted = list(range(mesh.ndim)) if dims is None else dims
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _only_here()
    index = tuple(slice(None) if dim in wanted else coordinate[dim] for dim in range(mesh.ndim))
    ranks = tuple(int(rank) for rank in mesh.mesh[index].flatten().tolist())
    return Holders(ranks, lambda: [mesh.get_group(dim) for dim in wanted])


def _on_group(group: Any) -> Holders:
    return Holders(tuple(dist.get_process_group_ranks(group)), lambda: [group])


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(map(_is_plain, value))
    )


def _setter(container: Any, key: Any) -> Callable[[Any], None]:
    return functools.partial(operator.setitem, container, key)


def find_parts(
    namespace: Mapping[str, Any], expression: str
) -> tuple[list[ModelPart], list[Entry], list[StateSlot]]:
    """Return the tensors and plain values in an expression's value, the objects that were left out,
    and the places of optimizer state.

    Args:
        namespace: namespace of the rank.
        expression: as for `check`.

    Raises:
        MeshUsageError: the value has nothing to compare.
    """
    walk, expression = Walk(namespace), expression.strip()
    if not expression:
        parts, left_out = _find_wrapped(walk, namespace)
        return parts, left_out, walk.slots
    if expression == "rng" and "rng" not in namespace:
        return list(rng_parts(why_differs="")), [], []
    value = eval(compile(expression, "<expression>", "eval"), dict(namespace))

    def replace(new: Any) -> None:
        if not (expression.isidentifier() and isinstance(namespace, dict)):
            raise MeshUsageError(f"{expression!r} cannot be assigned to: name the variable")
        namespace[expression] = new

    parts = list(walk.parts(value, expression, replace))
    if not parts:
        raise MeshUsageError(
            f"{expression} is a {type(value).__name__} without tensors or numbers: name a model, "
            "an optimizer, a tensor, or rng"
        )
    return parts, [], walk.slots


def _find_wrapped(walk: Walk, namespace: Mapping[str, Any]) -> tuple[list[ModelPart], list[Entry]]:
    """Return the parts of the user's DDP, FSDP and tensor-parallel models and of their optimizers,
    and an `Entry` for each of the other models and optimizers.
    """
    visible = [(name, value) for name, value in namespace.items() if not name.startswith("_")]
    models = [(name, value) for name, value in visible if isinstance(value, nn.Module)]
    optimizers = [(name, value) for name, value in visible if isinstance(value, Optimizer)]
    wrapped = [model for _, model in models if is_wrapped(model)]
    seen = {id(part) for model in wrapped for part in model.modules() if part is not model}
    parts: list[ModelPart] = []
    left_out: list[Entry] = []
    found: list[tuple[str, Any]] = [*models, *optimizers]
    for name, value in found:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            is_known = any(walk.knows(p) for group in value.param_groups for p in group["params"])
        else:
            is_known = is_wrapped(value)
        if is_known:
            parts += walk.parts(value, name)
        elif isinstance(value, Optimizer) or any(True for _ in value.parameters()):
            left_out.append(Entry(path=name, kind="not wrapped"))
    return parts, left_out
