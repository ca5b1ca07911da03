"""Computes which part of a DTensor a rank holds, and the part's place in the whole. Runs no
collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# [begin, end) each, ascending.
Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor, and which part of the whole it is.

    Attributes:
        local: the part.
        placements: in words, "" of a tensor that is no DTensor.
        shard: which part it is; ranks with the same should hold the same values. -1 in mesh dims
            over which it is replicated.
        offset: where it begins in the whole.
        mesh_dim_names, mesh_shape, mesh_ranks, coordinate: the mesh, its ranks in row-major order,
            and where the rank is in it.
        note: what is odd about it.
    """

    local: torch.Tensor
    placements: str = ""
    shard: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    mesh_ranks: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    note: str = ""


def spell(placements: Sequence[Any]) -> str:
    """Return placements as torch writes them, with public names where torch writes ``_S(0, 2)``."""
    return ", ".join(re.sub(r"^_S\(", "StridedShard(", str(placement)) for placement in placements)


def shard_of_dtensor(value: DTensor) -> Shard:
    """Return this rank's part of a DTensor, without waiting for collectives that compute it."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    shard = Shard(
        value._local_tensor,
        spell(value.placements),
        mesh_dim_names=tuple(mesh.mesh_dim_names or (f"dim {dim}" for dim in range(mesh.ndim))),
        mesh_shape=tuple(mesh.shape),
        mesh_ranks=tuple(mesh.mesh.flatten().tolist()),
    )
    if coordinate is None:
        # What it has is a part of nothing, and like no other rank's.
        return replace(shard, shard=(-2,) * mesh.ndim, note="this rank is not in its mesh")
    runs = runs_in_whole(
        tuple(value.shape),
        shard.mesh_shape,
        coordinate,
        value.placements,
        order_of(value, mesh.ndim),
    )
    return replace(
        shard,
        coordinate=tuple(coordinate),
        shard=tuple(
            -1 if placement.is_replicate() else index
            for placement, index in zip(value.placements, coordinate, strict=True)
        ),
        offset=tuple(
            dim[0][0] if dim else size for dim, size in zip(runs, value.shape, strict=True)
        ),
        note="; ".join(_oddities(value, runs)),
    )


def _oddities(value: DTensor, runs: Sequence[Runs]) -> Iterator[str]:
    if any(len(dim) > 1 for dim in runs):
        yield "its part is no single block of the whole: the offset is its first element's"
    sizes = tuple(sum(end - begin for begin, end in dim) for dim in runs)
    if sizes != tuple(value._local_tensor.shape):
        yield f"its part has not the shape {sizes} that its placements say"
    if any(placement.is_partial() for placement in value.placements):
        yield "partial: each rank holds a term of the value"


def runs_in_whole(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    order: Sequence[int],
) -> list[Runs]:
    """Return, for each dim, the [begin, end) ranges of the whole tensor that a rank holds.

    Uneven shards are as `torch.chunk` cuts them, one mesh dim after the other.

    Args:
        shape: of the whole.
        mesh_shape, coordinate: the mesh, and where the rank is.
        placements: one a mesh dim.
        order: the mesh dims as they cut.
    """
    held: list[Runs] = [[(0, size)] if size else [] for size in shape]
    for mesh_dim in order:
        placement = placements[mesh_dim]
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated, partial
            continue
        # FSDP2 over tensor parallelism cuts within the parts that later mesh dims cut out.
        num_outer = int(getattr(placement, "split_factor", 1))
        inside: Runs = []
        for outer in range(num_outer):
            part = _chunk(held[dim], num_outer, outer)
            inside += _chunk(part, mesh_shape[mesh_dim], coordinate[mesh_dim])
        held[dim] = list(_joined(inside))
    return held


def _chunk(runs: Runs, num_chunks: int, index: int) -> Runs:
    """Return the ranges of indices that `torch.chunk` gives to one chunk of these ranges."""
    total = sum(end - begin for begin, end in runs)
    size = -(-total // num_chunks)
    low, high = min(index * size, total), min((index + 1) * size, total)
    found, passed = [], 0
    for begin, end in runs:
        first, last = max(low - passed, 0), min(high - passed, end - begin)
        if first < last:
            found.append((begin + first, begin + last))
        passed += end - begin
    return found


def _joined(runs: Runs) -> Iterator[tuple[int, int]]:
    """Join ranges of indices where one begins at the end of the one before."""
    current: tuple[int, int] | None = None
    for begin, end in runs:
        if current is not None and current[1] == begin:
            current = (current[0], end)
            continue
        if current is not None:
            yield current
        current = (begin, end)
    if current is not None:
        yield current


def order_of(value: DTensor, num_dims: int) -> Sequence[int]:
    """Return the order in which a DeviceMesh's dims split a tensor: from left to right, unless the
    DTensor has another (torch 2.12).
    """
    said = getattr(value._spec, "shard_order", None) or ()
    ordered = [mesh_dim for entry in said for mesh_dim in entry.mesh_dims]
    return [*ordered, *(mesh_dim for mesh_dim in range(num_dims) if mesh_dim not in ordered)]
