"""Pushes values to ranks, whole or in parts, and checks them before anything is sent."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import MeshUsageError
from ...wire.files import SUFFIXES, FileValue, choose, read_npy, read_safetensors
from ...wire.values import (
    Placements,
    PushNames,
    PushParts,
    read_placements,
)
from ..arguments import dump_names
from ..rank_set import RankSet


def from_file(path: str | os.PathLike[str], key: str | None = None) -> FileValue:
    """Name a value that each rank reads from a file itself:
    `mesh.push(x=cellmesh.from_file("w.npy"))`.

    The file is mapped copy-on-write, so that ranks share its pages, read what they touch and change
    no file. Of one that is pushed with ``shard=`` or ``placements=``, each rank reads its part.

    Args:
        path: a ``.safetensors``, ``.npy``, or ``.pt`` (``.pth``) file of ``torch.save``.
        key: of a tensor in it; None for all: a dict of tensors, or what was saved.

    Raises:
        MeshUsageError: there is no such file or key, or the file is shorter than its header says.
    """
    absolute = os.path.abspath(os.path.expanduser(path))
    try:
        num_bytes = os.stat(absolute).st_size
        suffix = os.path.splitext(absolute)[1].lower()
        if suffix == ".safetensors":
            entries = read_safetensors(absolute)
            if key is None:
                return FileValue(absolute, None, num_bytes)
            return FileValue(
                absolute, key, num_bytes, tuple(choose(entries, key, absolute)["shape"])
            )
        if suffix == ".npy":
            if key is not None:
                raise MeshUsageError(
                    f"{absolute} holds one array, and no key {key!r}: leave the key out"
                )
            return FileValue(absolute, None, num_bytes, read_npy(absolute).shape)
    except OSError as e:
        raise MeshUsageError(f"{absolute} cannot be read: {e.strerror}") from e
    if suffix not in SUFFIXES:
        raise MeshUsageError(f"{absolute} is no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    if not zipfile.is_zipfile(absolute):
        raise MeshUsageError(
            f"{absolute} ({num_bytes} bytes) was cut short, or is no file that torch.save writes "
            "since 1.6"
        )
    return FileValue(absolute, key, num_bytes)


def check_shard(names: Mapping[str, Any], dim: Any, num_ranks: int) -> int:
    """Raise an error unless values can be split along a dim among ranks.

    Raises:
        MeshUsageError: one cannot; says which, and why.
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise MeshUsageError(
            "shard is the dim along which values are split, as in "
            f"shard=0, and no {type(dim).__name__}; to "
            'bind that name, `mesh.push({"shard": value})`'
        )
    for name, value in _leaves(names):
        shape = _shape_of(name, value)
        if shape is None:
            continue
        _check_dim(name, dim, shape)
        if shape[dim] < num_ranks:
            raise MeshUsageError(
                f"{name} has {shape[dim]} along dim {dim}, and there are {num_ranks} ranks: some "
                f"would get nothing. Push it whole, or to {shape[dim]} of them "
                f"(`mesh[:{shape[dim]}].push`)"
            )
    return dim


def check_placements(
    names: Mapping[str, Any], placements: Any, dims: Mapping[str, int], is_whole_mesh: bool
) -> Placements:
    """Raise an error unless DTensors with these placements can be made of values.

    Raises:
        MeshUsageError: they cannot; says of which, and why.
    """
    read = read_placements(placements)
    if not is_whole_mesh:
        raise MeshUsageError(
            "a DTensor is on the whole mesh: push with placements to `mesh`, not to some ranks"
        )
    if len(read) != len(dims):
        shape = ", ".join(f"{name}={size}" for name, size in dims.items())
        raise MeshUsageError(
            f"{len(read)} placements for a mesh of {len(dims)} dims ({shape}): give one for each, "
            "Shard(dim) or Replicate()"
        )
    for name, value in _leaves(names):
        dtype: Any = getattr(value, "dtype", None)
        if hasattr(dtype, "isnative") and (
            dtype.kind not in "biufc" or not dtype.isnative or dtype.char in "gG"
        ):
            raise MeshUsageError(
                f"{name} is an array of {dtype}, of which torch makes no tensors, nor DTensors: "
                "push it with shard=, or convert it with `.astype(...)`"
            )
        for dim in read:
            if dim is not None:
                _check_dim(name, dim, _shape_of(name, value))
    return read


def reduce_to_cpu(value: Any) -> Any:
    """Return how pickle is to reduce a tensor as a CPU tensor: ranks move only their parts."""
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.device.type not in ("cpu", "meta")
    ):
        return value.detach().cpu().requires_grad_(value.requires_grad).__reduce_ex__(5)
    return NotImplemented


def _check_dim(name: str, dim: int, shape: Sequence[int] | None) -> None:
    if shape is not None and not -len(shape) <= dim < len(shape):
        raise MeshUsageError(
            f"{name} has {len(shape)} dims, {tuple(shape)}, and no dim {dim} to be split"
        )


def _shape_of(name: str, value: Any) -> tuple[int, ...] | None:
    """Return a value's shape; None if only ranks can know it."""
    if isinstance(value, FileValue):
        return value.shape
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if type(value) not in (numpy.ndarray, numpy.memmap):
            raise MeshUsageError(
                f"{name} is a {type(value).__name__}: only plain arrays are split, and what it has "
                "beside its elements would be lost. Push it whole"
            )
        return tuple(value.shape)
    if torch is not None and isinstance(value, torch.Tensor):
        kind = type(value)
        if (
            kind not in (torch.Tensor, torch.nn.Parameter)
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            raise MeshUsageError(
                f"{name} is a {kind.__name__} ({value.layout}): only plain, dense tensors are "
                "split. Push it whole"
            )
        if value.is_meta:
            raise MeshUsageError(f"{name} is a meta tensor, and has no data to be split")
        return tuple(value.shape)
    raise MeshUsageError(
        f"{name} is a {type(value).__name__}: only tensors, arrays and nests of them are split. "
        "Push it without shard= and placements="
    )


def _leaves(names: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(names, dict):
        for key, value in names.items():
            yield from _leaves(value, f"{name}[{key!r}]" if name else key)
    elif type(names) in (list, tuple):
        for position, value in enumerate(names):
            yield from _leaves(value, f"{name}[{position}]")
    else:
        yield name, names


def push(
    ranks: RankSet,
    names: Mapping[str, Any],
    shard: int | None,
    placements: Sequence[Any] | str | None,
) -> None:
    """Bind names in the namespaces of ranks, and wait.

    Args:
        ranks, shard, placements: as of `Ranks.push`.
        names: name -> value.

    Raises:
        UnpicklableError, MeshUsageError: as `Ranks.push`.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise MeshUsageError(f"{name!r} is no name")
    if shard is not None and placements is not None:
        raise MeshUsageError("shard and placements exclude each other: placements make DTensors")
    dim, placed, session = 0, None, ranks.session
    if shard is not None:
        dim = check_shard(names, shard, len(ranks))
    elif placements is not None:
        placed = check_placements(names, placements, session.dims, len(ranks) == session.num_ranks)
    if shard is None and placed is None:
        pickled, buffers, num_bytes = ranks.lend(*dump_names(names))
        ranks.start(PushNames(0, pickled), "push", buffers, num_bytes=num_bytes).result()
        return
    pickled, buffers, num_bytes = ranks.lend(*dump_names(names, reduce_to_cpu))
    verb = PushParts(0, pickled, ranks.ranks, dim, placed)
    ranks.start(verb, "push", buffers, num_bytes=num_bytes).result()
