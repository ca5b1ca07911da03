"""Messages that carry values to ranks and back, and which part of a whole tensor a rank holds."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import MeshUsageError
from .verb import Pickled, Verb, WorkVerb

Box = tuple[tuple[int, int], ...]
Placements = tuple[int | None, ...]


@dataclass(frozen=True)
class Part:
    """One rank's part of a value that the controller gathers from several ranks.

    Attributes:
        value: its part; None where another rank gives the same.
        shape: of the whole DTensor; None of a plain value.
        box: where the part is in it.
        runs: for each dim, the boxes' ``(start, length)`` where the part is several boxes, as FSDP2
            over tensor parallelism cuts; () where it is one.
    """

    value: Any
    shape: tuple[int, ...] | None = None
    box: Box = field(default=())
    runs: tuple[Box, ...] = ()

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield, for each box of the part, its slices in the whole tensor and in the part."""
        dims = []
        for runs in self.runs or [(each,) for each in self.box]:
            ends = itertools.accumulate(length for _, length in runs)
            dims.append(
                [
                    (slice(a, a + n), slice(end - n, end))
                    for (a, n), end in zip(runs, ends, strict=True)
                ]
            )
        for chosen in itertools.product(*dims):
            yield tuple(outer for outer, _ in chosen), tuple(inner for _, inner in chosen)


def chunk(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return start and length of one of the parts that ``torch.chunk`` and `Shard` make: all equal
    but the last; some may be empty.
    """
    size = -(-length // num_parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def spread(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return start and length of a part of ``torch.tensor_split``: lengths differ by 0 or 1."""
    size, num_longer = divmod(length, num_parts)
    return index * size + min(index, num_longer), size + (index < num_longer)


def plain_box(shape: Sequence[int], dim: int, num_parts: int, index: int) -> Box:
    """Return the box (start and length per dim) of one rank, for a tensor split along one dim."""
    dim %= len(shape)
    return tuple(
        spread(length, num_parts, index) if at == dim else (0, length)
        for at, length in enumerate(shape)
    )


def placed_box(
    shape: Sequence[int],
    placements: Placements,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """Return the box of the rank at a coordinate of a DeviceMesh, split as DTensor splits."""
    box = [(0, length) for length in shape]
    for dim, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if dim is not None:
            start, length = box[dim % len(shape)]
            inner, rest = chunk(length, size, index)
            box[dim % len(shape)] = start + inner, rest
    return tuple(box)


def read_placements(given: Any) -> Placements:
    """Convert a user's DTensor placements, objects or text, to a dim or None per mesh dim.

    Args:
        given: a sequence of `torch.distributed.tensor.Shard` and `Replicate`, or ``"Shard(0),
            Replicate()"``.

    Raises:
        MeshUsageError: it is neither, or has a placement that cannot be made from a whole tensor.
    """
    if isinstance(given, str):
        return tuple(
            _read_word(word) for word in re.findall(r"[^,()]+(?:\([^)]*\))?", given) if word.strip()
        )
    try:
        return tuple(_read_placement(each) for each in given)
    except TypeError:
        raise MeshUsageError(
            f"placements={given!r} is no sequence of placements, as "
            "[Shard(0), Replicate()] is; to bind that "
            'name, `mesh.push({"placements": value})`'
        ) from None


def _read_placement(placement: Any) -> int | None:
    kind = type(placement).__name__
    if kind == "Shard":
        return int(placement.dim)
    if kind == "Replicate":
        return None
    raise MeshUsageError(
        f"{placement!r} cannot be made of a whole tensor: placements are Shard(dim) and "
        "Replicate(), one for each dim of the mesh"
    )


def _read_word(word: str) -> int | None:
    match = re.fullmatch(r"\s*(?:Shard\(\s*(?:dim\s*=\s*)?(-?\d+)\s*\)|Replicate\(\s*\))\s*", word)
    if match is None:
        raise MeshUsageError(
            f"{word.strip()!r} is no placement: write Shard(0) or "
            "Replicate(), one for each dim of the mesh, "
            'as in --placements "Shard(0), Replicate()"'
        )
    return None if match[1] is None else int(ast.literal_eval(match[1]))


class PushNames(WorkVerb, frozen=True):
    """Ask a rank to bind the names of a pickled dict in its namespace."""

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled


class PushParts(WorkVerb, frozen=True):
    """Ask a rank to bind, to names of a pickled dict, its parts of the tensors and arrays in it.

    Without `placements`, they are split along `dim` among `ranks`, in that order. With them, each
    becomes a DTensor on the rank's DeviceMesh: for each of its dims, the tensor's dim that it
    shards, or None.
    """

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled
    ranks: tuple[int, ...]
    dim: int = 0
    placements: tuple[int | None, ...] | None = None


class GatherParts(WorkVerb, frozen=True):
    """Ask a rank for its `Part` of an expression's value, which the controller joins with other
    ranks'.
    """

    run: int
    expression: str


class PullNames(WorkVerb, frozen=True):
    """Ask a rank for the value of an expression in its namespace."""

    run: int
    expression: str


class Freed(Verb, frozen=True):
    """A rank says that it holds no reference to the memory of a segment any more (`loan`: see
    `wire.segments.Ref`).

    `is_shared`: the rank has forked in between, so that another process may read it still.
    """

    loan: int
    is_shared: bool = False
    run: int = -1


class Chunk(Verb, frozen=True):
    """A part of a segment's bytes, sent to a process on another host, which joins the parts.

    The frame that follows goes `at` this offset into the segment of the `loan`; so many bytes of
    the segment are sent after it.
    """

    num_buffers: ClassVar[int] = 1

    loan: int
    at: int
    num_left: int


class Unwanted(Verb, frozen=True):
    """Says that the rest of a segment need not be sent, as no message needs it any more."""

    loan: int
