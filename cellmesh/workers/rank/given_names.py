"""The variables that cellmesh defines on each rank (`rank`, `world_size`, `device`, `mesh`).

Detects that a cell has bound one to another value, which later cells would use, often on some ranks
only; updates the names for a mesh of another size, and finds variables that are bound to the
earlier one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...stdlib import os
from ...wire.groups import Heal
from ..groups.groups import Groups

_NAMES = ("rank", "world_size", "device", "mesh")


class GivenNames:
    """The values that cellmesh gave to a rank's variables `rank`, `world_size`, `device` and
    `mesh`, to report once if user code rebinds one.

    Args:
        namespace: namespace of the rank, with these values.
        hidden: names that lists of the user's names leave out, with the values that are not the
            user's.

    Attributes:
        values: given values by name, without names that have been reported.
    """

    def __init__(self, namespace: Mapping[str, Any], hidden: dict[str, Any]) -> None:
        self._namespace, self._hidden = namespace, hidden
        self.values: dict[str, Any] = {}
        self.renew(_NAMES)

    def renew(self, names: Iterable[str]) -> None:
        """Record the current values of these variables as those that cellmesh has given to the
        rank.
        """
        given = {n: self._namespace[n] for n in names if n in self._namespace}
        self.values.update(given)
        self._hidden.update(given)

    def forget(self, names: Iterable[str]) -> None:
        """Stop reporting changes of variables to which the notebook itself has pushed values."""
        for name in names:
            self.values.pop(name, None)

    def say(self) -> str:
        """Return a text on variables that user code has newly rebound, and on ways to restore them;
        "" if there are none.
        """
        texts = []
        for name, given in list(self.values.items()):
            value = self._namespace.get(name, given)
            if value is given or _is_alike(value, given):
                continue
            del self.values[name]
            texts.append(
                f"`{name}` now has another value than this rank was given: "
                f"{_how_to_restore(name, given)} restores it"
            )
        return "\n".join(texts)


def _is_alike(value: Any, given: Any) -> bool:
    """Return whether a variable's value is equivalent to the one that cellmesh gave it; runs no
    user code.
    """
    kind = type(given)
    with contextlib.suppress(Exception):  # an incomplete mesh may raise
        if kind.__name__ == "device" and type(value) in (str, int, kind):
            value = kind(value)  # a device without index means the rank's device
            return bool(value.type == given.type and value.index in (None, given.index))
        return type(value) is kind and bool(value == given)
    return False


def _how_to_restore(name: str, given: Any) -> str:
    if name == "device":
        return f"`device = torch.device({str(given)!r})`"
    if name == "mesh":
        dims = zip(given.mesh_dim_names, given.shape, strict=True)
        return f"`%dist_mesh {' '.join(f'{dim}={size}' for dim, size in dims)}`"
    return f"`{name} = dist.get_{name}()`"


# ---------------------------------------------------------------- resizing the mesh


def resize(work: Heal, groups: Groups, namespace: dict[str, Any]) -> tuple[str, ...]:
    """Replace this rank's process groups and `mesh` by those of another mesh size; their
    connections are made later.

    Args:
        work: order with the new size.
        groups: process groups of the rank.
        namespace: namespace of the user.

    Returns:
        Notes for the user.
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
    """Yield the names of variables that refer to process groups: DTensors, groups, DeviceMeshes of
    the user, and models and optimizers that contain such objects.
    """
    kinds = _kinds()
    for name, value in list(namespace.items()):
        if name.startswith("_") or name == "mesh":
            continue
        if any(issubclass(type(each), kinds) for each in _parts(value)):
            yield name


def _kinds() -> tuple[type, ...]:
    """Return the types whose objects refer to process groups, as far as their modules have been
    imported.
    """
    names = (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed.device_mesh", "DeviceMesh"),
        ("torch.distributed", "ProcessGroup"),
        ("torch.nn.parallel", "DistributedDataParallel"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
        ("torch.distributed.fsdp", "FSDPModule"),  # its parameters are no DTensors after a forward
    )
    found = [getattr(sys.modules.get(module), kind, None) for module, kind in names]
    return tuple(kind for kind in found if isinstance(kind, type))


def _parts(value: Any) -> Iterable[Any]:
    """Return a model with its submodules, parameters and buffers, an optimizer's parameters, or any
    other value itself.
    """
    if issubclass(type(value), torch.nn.Module):
        return [value, *value.modules(), *value.parameters(), *value.buffers()]
    if issubclass(type(value), torch.optim.Optimizer):
        return [each for group in value.param_groups for each in group["params"]]
    return [value]
