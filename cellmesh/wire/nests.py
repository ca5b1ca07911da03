"""Tensors and arrays in nested tuples, lists and dicts: those whose rows ranks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import MeshUsageError
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
    if isinstance(value, dict):
        return {key: map_rows(each, act) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_rows(each, act) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def split_rows(value: Any, index: int, num_parts: int) -> Any:
    """Return one part of each tensor and array in a nest, split along dim 0 as by
    ``torch.tensor_split``.
    """

    def part(rows: Any) -> Any:
        start, length = part_along(len(rows), num_parts, index)
        return rows[start : start + length]

    return map_rows(value, part)


def check_rows(value: Any, num_parts: int, name: str) -> None:
    """Raise an error unless the tensors and arrays in a nest have the same number of rows, which
    suffices for this many parts.

    Raises:
        MeshUsageError: they do not, or the nest has none.
    """
    shapes: list[tuple[int, ...]] = []
    map_rows(value, lambda rows: shapes.append(tuple(rows.shape)))
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
    """
    first = parts[0]
    if is_rows(first):
        module: Any = sys.modules["torch" if hasattr(first, "untyped_storage") else "numpy"]
        return (module.concatenate if len(first.shape) else module.stack)(tuple(parts))
    is_nest = any(type(part) is not type(first) for part in parts) is False
    if is_nest and isinstance(first, dict) and all(part.keys() == first.keys() for part in parts):
        return {key: join_rows([part[key] for part in parts]) for key in first}
    if is_nest and isinstance(first, (tuple, list)) and len({*map(len, parts)}) == 1:
        found: list[Any] = []
        map_rows(first, found.append)
        if found:
            joined = [join_rows(column) for column in zip(*parts, strict=True)]
            return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return [*parts]
