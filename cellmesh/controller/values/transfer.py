"""Pushes values to ranks, whole or sharded, after checking them; pulls a value of several ranks,
gathered or reduced.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ...errors import MeshUsageError, did_you_mean
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.segments import SegmentFrame, map_joined
from ...wire.values import GatherParts, Part, PullNames, PushNames, PushParts
from ..rank_set import RankSet, dump_names

Reduction = Literal["mean", "sum", "stack"]
REDUCTIONS = get_args(Reduction)

# Placements as users write them, and as the repr of torch's objects.
_PLACEMENT = re.compile(r"Shard\((?:dim=)?(-?\d+)\)|Replicate\(\)")

# ---- to ranks


def push(
    ranks: RankSet,
    names: Mapping[str, Any],
    shard: int | None,
    placements: Sequence[Any] | str | None,
) -> None:
    """Assign variables in the namespaces of ranks. Blocks.

    Args:
        ranks: ranks that receive the values.
        names: name -> value.
        shard, placements: as in `Ranks.push`.

    Raises:
        UnpicklableError, MeshUsageError: as in `Ranks.push`.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise MeshUsageError(f"{name!r} is no name")
    if shard is None and placements is None:
        pickled, buffers, num_bytes = ranks.lend(*dump_names(names))
        ranks.start(PushNames(0, pickled), "push", buffers, num_bytes=num_bytes).result()
        return
    if shard is not None and placements is not None:
        raise MeshUsageError("shard and placements exclude each other: placements make DTensors")
    dim = 0 if shard is None else check_shard(names, shard, len(ranks))
    placed = None if placements is None else check_placements(names, placements, ranks)
    pickled, buffers, num_bytes = ranks.lend(*dump_names(names, reduce_to_cpu))
    verb = PushParts(0, pickled, ranks.ranks, dim, placed)
    ranks.start(verb, "push", buffers, num_bytes=num_bytes).result()


def check_shard(names: Mapping[str, Any], dim: Any, num_ranks: int) -> int:
    """Return `dim` if each value can be split along it into a part for each rank.

    Raises:
        MeshUsageError: a value cannot be split; the message names it and the reason.
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise MeshUsageError(
            "shard is the dim along which values are split, as in "
            f"shard=0, and no {type(dim).__name__}; to "
            'bind that name, `mesh.push({"shard": value})`'
        )
    for name, value in _leaves(names):
        shape = _shape_along(name, value, dim)
        if shape[dim] < num_ranks:
            raise MeshUsageError(
                f"{name} has {shape[dim]} along dim {dim}, and there are {num_ranks} ranks: some "
                f"would get nothing. Push it whole, or to {shape[dim]} of them "
                f"(`mesh[:{shape[dim]}].push`)"
            )
    return dim


def check_placements(
    names: Mapping[str, Any], given: Any, ranks: RankSet
) -> tuple[int | None, ...]:
    """Return the placements as a dim, or None to replicate, for each dim of the mesh.

    Raises:
        MeshUsageError: DTensors with these placements cannot be made of the values.
    """
    if not isinstance(given, str | list | tuple):
        raise MeshUsageError(
            f"placements={given!r} is no list of placements, as [Shard(0), Replicate()]; to bind "
            'that name, `mesh.push({"placements": value})`'
        )
    texts = given.strip("[] ").split(",") if isinstance(given, str) else map(repr, given)
    read = []
    for text in texts:
        match = _PLACEMENT.fullmatch(text.strip())
        if match is None:
            raise MeshUsageError(
                f"{text.strip()!r} cannot be made of a whole tensor: placements are Shard(dim) and "
                'Replicate(), as in --placements "Shard(0), Replicate()"'
            )
        read.append(int(match[1]) if match[1] else None)
    dims = ranks.session.dims
    if len(ranks) != ranks.session.num_ranks:
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
            _shape_along(name, value, dim)
    return tuple(read)


def _shape_along(name: str, value: Any, dim: int | None) -> tuple[int, ...]:
    shape = _shape_of(name, value)
    if dim is not None and not -len(shape) <= dim < len(shape):
        raise MeshUsageError(f"{name} has {len(shape)} dims, {shape}, and no dim {dim} to be split")
    return shape


def reduce_to_cpu(value: Any) -> Any:
    """Reduce a tensor on a device for pickle as a CPU tensor, so that each rank moves only its
    shard to its device.
    """
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.device.type not in ("cpu", "meta")
    ):
        return value.detach().cpu().requires_grad_(value.requires_grad).__reduce_ex__(5)
    return NotImplemented


def _shape_of(name: str, value: Any) -> tuple[int, ...]:
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


# ---- from ranks


def pull_one(ranks: RankSet, expression: str, gather: bool, reduce: str | None, dim: int) -> Any:
    """Evaluate an expression on ranks, and gather or reduce their values.

    Args:
        ranks, expression, gather, reduce, dim: as in `Ranks.pull`.

    Raises:
        MeshUsageError: the options exclude each other, or the values do not fit together.
        RankFailure: a rank could not evaluate the expression or pickle its value.
    """
    if gather and reduce is not None:
        raise MeshUsageError("gather and reduce exclude each other: gather puts parts together")
    if not gather and reduce not in REDUCTIONS:
        known = REDUCTIONS
        raise MeshUsageError(
            f"reduce={reduce!r} is none of {', '.join(known)}{did_you_mean(str(reduce), known)}"
        )
    verb = GatherParts if gather else PullNames
    run = ranks.start(verb(0, expression))
    if reduce is not None:
        return reduce_values(_as_mapping(ranks, run.result()), reduce, expression)
    frames = {
        rank: buffers[0]
        for rank in ranks.ranks
        if (buffers := run.payload_of(rank)[1]) and isinstance(buffers[0], SegmentFrame)
    }
    return gather_parts(_as_mapping(ranks, run.result()), frames, dim, expression)


def _as_mapping(ranks: RankSet, result: Any) -> dict[int, Any]:
    return {ranks.ranks[0]: result} if ranks.is_single else dict(result)


def gather_parts(
    parts: Mapping[int, Part], frames: Mapping[int, SegmentFrame], dim: int, name: str
) -> Any:
    """Gather ranks' parts of a tensor into one: DTensors by their placements, plain tensors and
    arrays by rank along a dim.

    Args:
        parts: rank -> its part.
        frames: rank -> the segment in which its part was sent, if any.
        dim: dim along which plain parts are concatenated.
        name: name of the value in errors.

    Raises:
        MeshUsageError: the parts do not fit together, or some are missing.
    """
    kinds = {part.shape for part in parts.values()}
    if kinds == {None}:
        placed, shape = _place(parts, dim, name)
    elif len(kinds) == 1:
        # A DTensor on a submesh, such as `mesh["tp"]`, is complete on each such submesh: one is
        # enough.
        boxes = {
            (part.box, part.runs): rank
            for rank, part in reversed([*parts.items()])
            if part.value is not None
        }
        given = {rank: parts[rank] for rank in sorted(boxes.values())}
        placed, shape = given, parts[min(parts)].shape or ()
        missing = math.prod(shape) - sum(math.prod(part.value.shape) for part in given.values())
        if missing:
            raise MeshUsageError(
                f"{name!r} is a DTensor, and {missing} of its {math.prod(shape)} elements are on "
                "ranks that were not asked: gather it on the whole mesh, `mesh.pull(..., "
                "gather=True)`"
            )
    else:
        raise MeshUsageError(
            f"{name!r} is not the same on all ranks: the DTensors' shapes are {kinds}"
        )
    first = placed[min(placed)].value
    joined = _join(placed, frames, first, shape)
    if joined is not None:
        return joined
    whole = _empty_like(first, shape)
    for part in placed.values():
        for outer, inner in part.pieces():
            whole[outer] = part.value[inner]
    return whole


def reduce_values(values: Mapping[int, Any], how: str, name: str) -> Any:
    """Reduce the values of ranks to one value; containers of tensors element by element.

    Args:
        values: rank -> value.
        how: one of `REDUCTIONS`.
        name: name of the value in errors.

    Raises:
        MeshUsageError: the values differ in type or shape, or are not numbers.
    """
    first, *others = values.values()
    if len({_describe(value) for value in values.values()}) > 1:
        raise MeshUsageError(f"{name} differs between ranks: {_by_rank(values, _describe)}")
    if isinstance(first, dict) or type(first) in (list, tuple):
        keys = list(first) if isinstance(first, dict) else range(len(first))
        parts = {
            key: reduce_values({r: v[key] for r, v in values.items()}, how, f"{name}[{key!r}]")
            for key in keys
        }
        return parts if isinstance(first, dict) else type(first)(parts.values())
    if _is_array(first):
        return _reduce_arrays([first, *others], how)
    if not isinstance(first, int | float | complex):
        raise MeshUsageError(
            f"{name} is a {_type_name(first)}, which has no {how}: tensors, arrays, numbers and "
            "nests of them have"
        )
    if how == "stack":
        return [first, *others]
    total = sum(values.values())
    return total / len(values) if how == "mean" else total


def _describe(value: Any) -> str:
    """Describe the type and shape of a value, which must be equal on all ranks for a reduction."""
    kind = _type_name(value)
    if isinstance(value, dict):
        return f"{kind} with the keys {', '.join(sorted(map(repr, value)))}"
    if type(value) in (list, tuple):
        return f"{kind} of {len(value)}"
    return f"{kind} {tuple(value.shape)}" if _is_array(value) else kind


def _place(
    parts: Mapping[int, Part], dim: int, name: str
) -> tuple[dict[int, Part], tuple[int, ...]]:
    """Concatenate plain parts along a dim: return the parts with their offset and size in each dim
    of the whole, and the shape of the whole.
    """
    values = {rank: part.value for rank, part in parts.items()}
    odd = next(
        (value for value in values.values() if not _is_array(value) or _is_subclass(value)), None
    )
    if odd is not None:
        raise MeshUsageError(
            f"{name!r} is a {_type_name(odd)}: tensors and arrays are gathered; "
            f"`mesh.pull({name!r})` gives each rank's value"
        )
    first = values[min(values)]
    if not -len(first.shape) <= dim < len(first.shape):
        raise MeshUsageError(
            f"{name!r} has {len(first.shape)} dims, and no dim {dim} to be gathered along"
        )
    dim %= len(first.shape)
    kinds = {
        (_type_name(v), v.dtype, *v.shape[:dim], None, *v.shape[dim + 1 :]) for v in values.values()
    }
    if len(kinds) > 1:
        raise MeshUsageError(
            f"{name!r} has parts that do not fit together along dim {dim}: "
            f"{_by_rank(values, _facts)}"
        )
    placed, at = {}, 0
    for rank, value in values.items():
        box = tuple((at, n) if d == dim else (0, n) for d, n in enumerate(value.shape))
        placed[rank] = Part(value, box=box)
        at += value.shape[dim]
    return placed, tuple(at if d == dim else n for d, n in enumerate(first.shape))


def _join(
    parts: Mapping[int, Part], frames: Mapping[int, SegmentFrame], first: Any, shape: Sequence[int]
) -> Any:
    """Map the memory of all parts into one contiguous range, as one tensor without a copy; return
    None if the parts cannot be adjacent.
    """
    if not shape or any(part.runs for part in parts.values()):
        return None
    ordered = sorted(parts.items(), key=lambda item: item[1].box)
    at = 0
    chosen: list[SegmentFrame] = []
    for rank, part in ordered:
        start, length = part.box[0]
        frame = frames.get(rank)
        if start != at or frame is None or part.box[1:] != tuple((0, n) for n in shape[1:]):
            return None
        if frame.ref.sizes != (part.value.nbytes,) or not _is_contiguous(part.value):
            return None
        at, chosen = at + length, [*chosen, frame]
    memory = map_joined(chosen)
    if memory is None:
        return None
    if _is_numpy(first):
        return sys.modules["numpy"].frombuffer(memory, first.dtype).reshape(shape)
    return sys.modules["torch"].frombuffer(memory, dtype=first.dtype).reshape(tuple(shape))


def _reduce_arrays(values: Sequence[Any], how: str) -> Any:
    first = values[0]
    if _is_numpy(first):
        stacked = sys.modules["numpy"].stack(values)
        if how == "stack":
            return stacked
        is_half = stacked.dtype.char == "e"  # whose sum may be too large for halfs
        reduced = getattr(stacked.astype("f4") if is_half else stacked, how)(0)
        return reduced.astype("f2") if is_half else reduced
    torch = sys.modules["torch"]
    stacked = torch.stack([value.detach() for value in values])
    if how == "stack":
        return stacked
    if how == "mean" and not (first.dtype.is_floating_point or first.dtype.is_complex):
        return stacked.double().mean(0).to(torch.get_default_dtype())
    return getattr(stacked, how)(0)


def _empty_like(first: Any, shape: Sequence[int]) -> Any:
    if _is_numpy(first):
        return sys.modules["numpy"].empty(shape, first.dtype)
    return sys.modules["torch"].empty(tuple(shape), dtype=first.dtype)


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(value, torch.Tensor)) or _is_numpy(value)


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _is_subclass(value: Any) -> bool:
    """Return whether an array has state beside its elements, as a masked array does."""
    return _is_numpy(value) and type(value).__name__ not in ("ndarray", "memmap")


def _is_contiguous(value: Any) -> bool:
    return bool(value.flags.c_contiguous if _is_numpy(value) else value.is_contiguous())


def _facts(value: Any) -> str:
    return f"{_type_name(value)} {tuple(value.shape)} {value.dtype}"


def _type_name(value: Any) -> str:
    return type(value).__name__


def _by_rank(values: Mapping[int, Any], describe: Any) -> str:
    said = group_ranks({rank: str(describe(value)) for rank, value in values.items()})
    return "; ".join(f"{text} on {describe_ranks(ranks)}" for text, ranks in said.items())
