"""Computes which part of a DTensor a rank holds, and the offset of the part in the whole. Runs no
collective.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import MeshUsageError
from ...wire.values import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# [begin, end) of each range, ascending.
Runs = list[tuple[int, int]]


def place_of(value: DTensor) -> dict[str, Any]:
    """Return the location of this rank's part of a DTensor in the whole, as attributes of its
    `TensorSummary`; `note` describes irregularities.
    """
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    # Public names in place of torch's ``_S(0, 2)``.
    placements = [re.sub(r"^_S\(", "StridedShard(", str(each)) for each in value.placements]
    place: dict[str, Any] = {
        "placements": ", ".join(placements),
        "mesh_dim_names": tuple(mesh.mesh_dim_names or (f"dim {at}" for at in range(mesh.ndim))),
        "mesh_ranks": tuple(mesh.mesh.flatten().tolist()),
    }
    if coordinate is None:
        # A rank outside the mesh holds no part; it must not compare equal to another rank.
        return {**place, "shard": (-2,) * mesh.ndim, "note": "this rank is not in its mesh"}
    runs = runs_in_whole(
        value.shape, mesh.shape, coordinate, value.placements, order_of(value, mesh.ndim)
    )
    shard = tuple(
        -1 if placement.is_replicate() else index
        for placement, index in zip(value.placements, coordinate, strict=True)
    )
    offset = tuple(dim[0][0] if dim else size for dim, size in zip(runs, value.shape, strict=True))
    notes = []
    if any(len(dim) > 1 for dim in runs):
        notes.append("its part is no single block of the whole: the offset is its first element's")
    if any(placement.is_partial() for placement in value.placements):
        notes.append("partial: each rank holds a term of the value")
    return {
        **place, "coordinate": tuple(coordinate), "shard": shard, "offset": offset,
        "note": "; ".join(notes),
    }  # fmt: skip


def ranges_of(value: DTensor) -> tuple[Box, ...] | None:
    """Return, for each dim, the ``(start, length)`` of the ranges of a DTensor that this rank
    holds; None if the rank is outside its mesh.

    Raises:
        MeshUsageError: its local tensors are no parts of the whole.
    """
    mesh, spec = value.device_mesh, value.placements
    if any(each.is_partial() or not (each.is_replicate() or hasattr(each, "dim")) for each in spec):
        raise MeshUsageError(
            f"a DTensor with placements {list(spec)} has no parts of the whole to gather: pull "
            "`x.full_tensor()`, or `x.to_local()` with reduce="
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    order = order_of(value, mesh.ndim)
    held = runs_in_whole(value.shape, mesh.shape, coordinate, spec, order)
    local = tuple(value._local_tensor.shape)
    if local != (expected := tuple(sum(b - a for a, b in dim) for dim in held)):
        raise MeshUsageError(
            f"the local part is {local}, and {list(spec)} of {tuple(value.shape)} "
            f"gives this rank {expected}: `DTensor.from_local` was given other sizes. Give it "
            "shape= and stride= of the whole, or pull `x.to_local()` with gather=True"
        )
    return tuple(tuple((a, b - a) for a, b in dim) or ((0, 0),) for dim in held)


def runs_in_whole(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    order: Sequence[int],
) -> list[Runs]:
    """Return, for each dim, the [begin, end) ranges of the whole tensor that a rank holds.

    Uneven shards are split as by `torch.chunk`, one mesh dim after the other.

    Args:
        shape: shape of the whole tensor.
        mesh_shape, coordinate: shape of the mesh, and the rank's coordinate in it.
        placements: placement for each mesh dim.
        order: mesh dims in the order in which they split the tensor.
    """
    held: list[Runs] = [[(0, size)] if size else [] for size in shape]
    for mesh_dim in order:
        placement = placements[mesh_dim]
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated or partial
            continue
        # FSDP2 over tensor parallelism splits within the parts that later mesh dims split off.
        num_outer = int(getattr(placement, "split_factor", 1))
        inside: Runs = []
        for outer in range(num_outer):
            part = _chunk(held[dim], num_outer, outer)
            inside += _chunk(part, mesh_shape[mesh_dim], coordinate[mesh_dim])
        held[dim] = _joined(inside)
    return held


def _chunk(runs: Runs, num_chunks: int, index: int) -> Runs:
    """Split ranges of indices into `num_chunks` chunks, as `torch.chunk` does; return the ranges in
    the chunk `index`.
    """
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


def _joined(runs: Runs) -> Runs:
    """Join each range of indices that begins at the end of the previous one with that one."""
    found: Runs = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def order_of(value: DTensor, num_dims: int) -> Sequence[int]:
    """Return the order in which a DeviceMesh's dims split a tensor: from left to right, unless the
    DTensor specifies another (since torch 2.12).
    """
    said = getattr(value._spec, "shard_order", None) or ()
    ordered = [mesh_dim for entry in said for mesh_dim in entry.mesh_dims]
    return [*ordered, *(mesh_dim for mesh_dim in range(num_dims) if mesh_dim not in ordered)]
