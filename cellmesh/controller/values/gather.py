"""Pulls one value from several ranks: puts parts of a tensor together, or reduces."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ...errors import MeshUsageError, did_you_mean
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.segments import SegmentFrame, map_joined
from ...wire.values import GatherParts, Part, PullNames
from ..rank_set import RankSet

Reduction = Literal["mean", "sum", "stack"]
REDUCTIONS = get_args(Reduction)


def pull_one(ranks: RankSet, expression: str, gather: bool, reduce: str | None, dim: int) -> Any:
    """Evaluate an expression on ranks, and gather or reduce their values.

    Args:
        ranks, expression, gather, reduce, dim: as of `Ranks.pull`.

    Raises:
        MeshUsageError: the options exclude each other, or the values make no whole.
        RankFailure: a rank could not evaluate or pickle it.
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
    """Put ranks' parts of a tensor together: DTensors by their placements, plain tensors and arrays
    by rank along a dim.

    Args:
        parts: rank -> what it gave.
        frames: the segments that these came in, where they did.
        dim: of plain parts.
        name: what the user calls it.

    Raises:
        MeshUsageError: they make no whole.
    """
    kinds = {part.shape for part in parts.values()}
    if kinds == {None}:
        placed, shape = _place(parts, dim, name)
    elif len(kinds) == 1:
        # Where it is on a part of the mesh, as `mesh["tp"]`, each of such parts gives a whole: one
        # is enough.
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
        name: what the user calls it.

    Raises:
        MeshUsageError: they cannot be reduced: they differ in kind or shape, or are no numbers.
    """
    first, *others = values.values()
    if any(type(other) is not type(first) for other in others):
        raise MeshUsageError(
            f"{name} has other types on other ranks: {_by_rank(values, _type_name)}"
        )
    if isinstance(first, dict):
        if any(other.keys() != first.keys() for other in others):
            raise MeshUsageError(f"{name} has other keys on other ranks")
        return {
            key: reduce_values(
                {r: value[key] for r, value in values.items()}, how, f"{name}[{key!r}]"
            )
            for key in first
        }
    if type(first) in (list, tuple):
        if any(len(other) != len(first) for other in others):
            raise MeshUsageError(
                f"{name} has other lengths on other ranks: {_by_rank(values, len)}"
            )
        return type(first)(
            reduce_values({r: value[i] for r, value in values.items()}, how, f"{name}[{i}]")
            for i in range(len(first))
        )
    if _is_array(first):
        if any(other.shape != first.shape for other in others):
            raise MeshUsageError(
                f"{name} has other shapes on other ranks: {_by_rank(values, _shape)}"
            )
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


def _place(
    parts: Mapping[int, Part], dim: int, name: str
) -> tuple[dict[int, Part], tuple[int, ...]]:
    """Return ranks' parts as plain tensors, the offsets and sizes of each in the whole, and the
    whole's shape.
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
    if (
        len(
            {
                (_type_name(v), len(v.shape), *v.shape[:dim], *v.shape[dim + 1 :], v.dtype)
                for v in values.values()
            }
        )
        > 1
    ):
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
        numpy = sys.modules["numpy"]
        if how == "stack":
            return numpy.stack(values)
        kind = first.dtype
        if not kind.hasobject:  # wide enough for the sum, as numpy chooses
            kind = getattr(numpy, how)(numpy.zeros(1, kind)).dtype
        total = first.astype("f4" if kind == "f2" else kind)
        for value in values[1:]:
            total = total + value
        return (total / len(values) if how == "mean" else total).astype(kind)
    torch = sys.modules["torch"]
    if how == "stack":
        return torch.stack([value.detach() for value in values])
    floats = first.dtype.is_floating_point or first.dtype.is_complex
    kind = first.dtype if floats else torch.int64 if how == "sum" else torch.get_default_dtype()
    wide = kind if floats or how == "sum" else torch.float64
    wide = torch.float32 if wide in (torch.float16, torch.bfloat16) else wide
    total = first.detach().to(wide, copy=True)
    for value in values[1:]:
        total += value.detach().to(wide)
    return (total / len(values) if how == "mean" else total).to(kind)


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


def _shape(value: Any) -> str:
    return str(tuple(value.shape))


def _facts(value: Any) -> str:
    return f"{_type_name(value)} {tuple(value.shape)} {value.dtype}"


def _type_name(value: Any) -> str:
    return type(value).__name__


def _by_rank(values: Mapping[int, Any], describe: Any) -> str:
    said = group_ranks({rank: str(describe(value)) for rank, value in values.items()})
    return "; ".join(f"{text} on {describe_ranks(ranks)}" for text, ranks in said.items())
