"""Cuts a rank's part out of a pushed value, and returns a rank's part of a gathered one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import MeshUsageError
from ..wire.values import Box, Part, PushParts, placed_box, plain_box
from .rank.value_transfer import is_dtensor

if TYPE_CHECKING:
    from .groups.groups import Groups


def own_parts(names: Mapping[str, Any], work: PushParts, groups: Groups) -> dict[str, Any]:
    """Return this rank's parts of the tensors that the controller has pushed to several ranks.

    Args:
        names: name -> a tensor or an array, or nests of them.
        work: how they are split.
        groups: the rank's, which know its rank, device and mesh, whatever a user binds to these
            names.

    Raises:
        MeshUsageError: one cannot be split; only ranks know what is in some files.
    """
    rank, device = groups.rank, groups.placement.device
    if work.placements is None:
        index = work.ranks.index(rank)

        def split(name: str, whole: Any) -> Any:
            _check(name, whole, work.dim, len(work.ranks))
            return _cut(whole, plain_box(whole.shape, work.dim, len(work.ranks), index), device)
    else:
        placements = work.placements

        def split(name: str, whole: Any) -> Any:
            for dim in placements:
                _check(name, whole, dim, 0)
            return _distribute(whole, placements, groups.mesh, device)

    return {name: _map(split, name, value) for name, value in names.items()}


def give_part(value: Any) -> Part:
    """Return this rank's part of a value that the controller gathers from several ranks.

    Raises:
        MeshUsageError: it is a DTensor whose parts are no parts of the whole.
    """
    if not is_dtensor(value):
        return Part(_settle(value))
    from torch.distributed.tensor import Replicate

    from .inspect.shards import order_of, runs_in_whole

    mesh, spec = value.device_mesh, value.placements
    if any(each.is_partial() or not (each.is_replicate() or hasattr(each, "dim")) for each in spec):
        raise MeshUsageError(
            f"a DTensor with placements {list(spec)} has no parts of the whole to gather: pull "
            "`x.full_tensor()`, or `x.to_local()` with reduce="
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Part(None, tuple(value.shape))
    is_first = all(
        not index for index, each in zip(coordinate, spec, strict=True) if type(each) is Replicate
    )
    held = runs_in_whole(value.shape, mesh.shape, coordinate, spec, order_of(value, mesh.ndim))
    runs = tuple(tuple((a, b - a) for a, b in dim) or ((0, 0),) for dim in held)
    local, box = (
        _settle(value.to_local()),
        tuple((dim[0][0], sum(n for _, n in dim)) for dim in runs),
    )
    if tuple(local.shape) != (expected := tuple(length for _, length in box)):
        raise MeshUsageError(
            f"the local part is {tuple(local.shape)}, and {list(spec)} of {tuple(value.shape)} "
            f"gives this rank {expected}: `DTensor.from_local` was given other sizes. Give it "
            "shape= and stride= of the whole, or pull `x.to_local()` with gather=True"
        )
    return Part(
        local if is_first else None,
        tuple(value.shape),
        box,
        runs if any(len(dim) > 1 for dim in runs) else (),
    )


def _settle(value: Any) -> Any:
    """Detach a tensor, and resolve its lazy conjugation and negation."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().resolve_conj().resolve_neg()
    return value


def _map(split: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)(
            (key, _map(split, f"{name}[{key!r}]", part)) for key, part in value.items()
        )
    if type(value) in (list, tuple):
        return type(value)(_map(split, f"{name}[{at}]", part) for at, part in enumerate(value))
    return split(name, value)


def _check(name: str, whole: Any, dim: int | None, least: int) -> None:
    """Check the shape of a value in a file, as the notebook does for values that it holds."""
    numpy = sys.modules.get("numpy")
    if not isinstance(whole, torch.Tensor) and (
        numpy is None or not isinstance(whole, numpy.ndarray)
    ):
        raise MeshUsageError(
            f"{name} is a {type(whole).__name__}: only tensors and arrays are split. Push it "
            "without shard= and placements=, or name a tensor with `from_file(path, key=)`"
        )
    shape = tuple(whole.shape)
    if dim is not None and not -len(shape) <= dim < len(shape):
        raise MeshUsageError(f"{name} has {len(shape)} dims, {shape}, and no dim {dim} to be split")
    if dim is not None and shape[dim] < least:
        raise MeshUsageError(
            f"{name} has {shape[dim]} along dim {dim}, and there are {least} ranks: some would "
            "get nothing. Push it whole"
        )


def _distribute(
    whole: Any, placements: tuple[int | None, ...], mesh: Any, device: torch.device
) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(whole, torch.Tensor):
        whole = torch.from_numpy(whole)
    box = placed_box(whole.shape, placements, mesh.shape, mesh.get_coordinate())
    with torch.no_grad():
        made = DTensor.from_local(
            _cut(whole, box, device).detach(),
            mesh,
            [Replicate() if dim is None else Shard(dim % whole.ndim) for dim in placements],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return made.requires_grad_(whole.requires_grad)


def _cut(whole: Any, box: Box, device: torch.device) -> Any:
    """Return a box of a whole tensor as a contiguous one; a view of a mapped one where possible."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(whole, numpy.ndarray):
        return numpy.ascontiguousarray(whole[tuple(slice(start, start + n) for start, n in box)])
    part = whole.detach()
    for dim, (start, length) in enumerate(box):
        part = part.narrow(dim, start, length)
    part = _settle(part)
    if not part.numel():
        part = torch.empty_like(part, memory_format=torch.contiguous_format)
    elif not part.is_contiguous() or part.device.type != "cpu":
        part = part.contiguous()
    elif part.shape != whole.shape and part.nbytes < part.untyped_storage().nbytes():
        # A view's storage is the whole: `torch.save` and `.untyped_storage()` would take all of it.
        start = part.storage_offset() * part.element_size()
        storage = part.untyped_storage()[start : start + part.nbytes]
        empty: Any = torch.empty(0, dtype=part.dtype)
        part = empty.set_(storage, 0, part.shape)
    return part.to(device).requires_grad_(whole.requires_grad)
