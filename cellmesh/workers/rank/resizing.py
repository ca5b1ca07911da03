"""Moves a rank to a mesh of another number of ranks: groups, environment, names; and finds the
names that stay bound to the earlier mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...stdlib import os
from ...wire.groups import Heal
from ..groups.groups import Groups


def resize(work: Heal, groups: Groups, namespace: dict[str, Any]) -> tuple[str, ...]:
    """Give this rank the groups of the new size, without connections; return notes for the user.

    Args:
        work: has the new size.
        groups: the rank's.
        namespace: the user's.
    """
    size = sum(work.layout)
    bound = sorted(find_bound(namespace))
    mesh = groups.resize(work.num_resizes, size, work.mesh_dim_names, work.mesh_shape)
    namespace.update(mesh=mesh, world_size=size)
    host = int(os.environ["GROUP_RANK"])
    os.environ.update(
        WORLD_SIZE=str(size),
        ROLE_WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(work.layout[host]),
        GROUP_WORLD_SIZE=str(len(work.layout)),
    )
    if not bound:
        return ()
    return (
        f"bound to an earlier size of the mesh: {', '.join(bound)} (make them again on `mesh`; "
        "%dist_load gives them what %dist_save saved before)",
    )


def find_bound(namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what holds process groups: DTensors, groups, the user's own meshes, and
    models and optimizers with such.
    """
    kinds = _kinds()
    for name, value in list(namespace.items()):
        if name.startswith("_") or name == "mesh":
            continue
        if any(issubclass(type(each), kinds) for each in _parts(value)):
            yield name


def _kinds() -> tuple[type, ...]:
    """The types that hold process groups, as far as their modules have been imported."""
    names = (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed.device_mesh", "DeviceMesh"),
        ("torch.distributed", "ProcessGroup"),
        ("torch.nn.parallel", "DistributedDataParallel"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
        ("torch.distributed.fsdp", "FSDPModule"),  # whose parameters are whole after a forward
    )
    found = [getattr(sys.modules.get(module), kind, None) for module, kind in names]
    return tuple(kind for kind in found if isinstance(kind, type))


def _parts(value: Any) -> Iterable[Any]:
    """Return a value with what a model or an optimizer has inside."""
    if issubclass(type(value), torch.nn.Module):
        return [value, *value.modules(), *value.parameters(), *value.buffers()]
    if issubclass(type(value), torch.optim.Optimizer):
        return [each for group in value.param_groups for each in group["params"]]
    return [value]
