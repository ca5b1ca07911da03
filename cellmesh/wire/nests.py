"""Tensors and arrays in nested tuples, lists, dicts and dataclasses: those whose rows ranks
share.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import MeshUsageError
from .mesh_dims import ranks_at
from .values import part_along


def is_rows(value: Any) -> bool:
    """Return whether a value is a tensor or an array."""
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return True
    return False


def map_rows(value: Any, act: Callable[[Any], Any]) -> Any:
    """Return a nest with each tensor and array in it replaced by what `act` returns for it."""
    if is_rows(value):
        return act(value)
    if (members := _members(value)) is None:
        return value
    return _rebuild(value, {key: map_rows(each, act) for key, each in members.items()})


def _members(value: Any) -> dict[Any, Any] | None:
    """Return the members of a nest by key, position or field; None for any other value."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return None


def _rebuild(nest: Any, members: dict[Any, Any]) -> Any:
    """Return a nest of the same class with other members."""
    kind = type(nest)
    if kind is dict:
        return members
    if isinstance(nest, (tuple, list)):
        return kind(*members.values()) if hasattr(nest, "_fields") else kind(members.values())
    rebuilt = copy.copy(nest)
    if isinstance(nest, dict):
        rebuilt.update(members)
        return rebuilt
    for name, member in members.items():
        object.__setattr__(rebuilt, name, member)  # a dataclass may be frozen
    return rebuilt


def split_rows(value: Any, index: int, num_parts: int) -> Any:
    """Return one part of each tensor and array in a nest, split along dim 0 as by
    ``torch.tensor_split``.
    """

    def part(rows: Any) -> Any:
        start, length = part_along(len(rows), num_parts, index)
        return rows[start : start + length]

    return map_rows(value, part)


def indices_in(dims: Mapping[str, int], dim: str, ranks: Sequence[int]) -> dict[int, int]:
    """Return the index of each rank's part, if ranks with the same index in a dim have the same.

    Args:
        dims: mesh dims, name -> size.
        dim: one of them; "" for a part for each rank.
        ranks: some of the mesh's ranks, which have all of the parts.

    Raises:
        MeshUsageError: the mesh has no such dim.
    """
    if not dim:
        return {rank: index for index, rank in enumerate(ranks)}
    parts = [{*ranks_at(dims, {dim: index})} & {*ranks} for index in range(dims.get(dim, 1))]
    index_of = {rank: at for at, part in enumerate(filter(None, parts)) for rank in part}
    return dict(sorted(index_of.items()))


def check_rows(value: Any, num_parts: int, name: str) -> None:
    """Raise an error unless the tensors and arrays in a nest have the same number of rows, which
    suffices for this many parts.

    Raises:
        MeshUsageError: they do not, or the nest has none, or a DTensor.
    """
    shapes: list[tuple[int, ...]] = []

    def note(rows: Any) -> None:
        if hasattr(rows, "device_mesh"):
            raise MeshUsageError(
                f"{name}.sharded splits plain tensors, and got a DTensor: pass its `.full_tensor()`"
            )
        shapes.append(tuple(rows.shape))

    map_rows(value, note)
    if not shapes:
        raise MeshUsageError(f"{name}.sharded has no tensors to split: call {name}(...)")
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) > 1:
        raise MeshUsageError(
            f"{name}.sharded splits tensors with the same number of rows, and these have the "
            f"shapes {', '.join(map(str, shapes))}"
        )
    if min(rows) < num_parts:
        raise MeshUsageError(
            f"{name}.sharded cannot split {min(rows)} rows into {num_parts} parts: pass at least a "
            f"row for each, or choose fewer ranks, as in {name.partition('.')[0]}[:{min(rows)}]"
        )


def join_rows(parts: Sequence[Any]) -> Any:
    """Join the results of several ranks: tensors and arrays along dim 0 (numbers among them are
    stacked), those of nests one by one; any other value becomes a list with the value of each part.

    Raises:
        MeshUsageError: tensors have sizes that cannot be joined.
    """
    first = parts[0]
    if all(map(is_rows, parts)):
        module: Any = sys.modules["torch" if hasattr(first, "untyped_storage") else "numpy"]
        shapes = [tuple(part.shape) for part in parts]
        if len({shape[1:] for shape in shapes} | {len(shape) for shape in shapes}) > 2:
            raise MeshUsageError(
                f"tensors of the shapes {', '.join(map(str, shapes))} cannot be joined along "
                "dim 0: `run.gather()[0]` has the value of each rank"
            )
        return (module.concatenate if len(first.shape) else module.stack)(tuple(parts))
    nests = [each for part in parts if (each := _members(part)) is not None]
    is_alike = len(nests) == len(parts) and len({*map(type, parts)}) == 1
    if not is_alike or any(each.keys() != nests[0].keys() for each in nests):
        return [*parts]
    found: list[Any] = []
    map_rows(first, found.append)
    if not found and not isinstance(first, dict):
        return [*parts]
    return _rebuild(first, {key: join_rows([each[key] for each in nests]) for key in nests[0]})


def join_parts(index_of: dict[int, int], results: Mapping[int, Any]) -> Any:
    """Join the results of ranks as `join_rows`, of one rank for each index of a part."""
    givers = {index: rank for rank, index in reversed(index_of.items())}
    return join_rows([results[givers[each]] for each in sorted(givers)])
