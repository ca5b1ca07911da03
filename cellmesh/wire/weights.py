"""Requests to copy tensors from ranks of one mesh to ranks of another, and the geometry of the
ranks' parts of a tensor.

A part is the product of ranges, one or several for each dim: FSDP2 over tensor parallelism gives a
rank several blocks of a tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from .values import Box
from .verbs import FeatureRequest, Pickled

# For each dim, ``(start, length)`` of each range, ascending.
Ranges = tuple[Box, ...]
Slices = tuple[slice, ...]


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of one tensor.

    Attributes:
        name: path of the tensor in the expression's value.
        problem: why it cannot be copied, to follow its name; "" if it can.
        dtype: element type, without ``torch.``.
        item_bytes: size of an element, in bytes.
        shape: shape of the whole tensor.
        ranges: the rank's part of the whole; None if the rank is outside the tensor's mesh.
        memory: address and strides of the part, which are equal for tied tensors.
        is_replica: whether ranks with the same part hold equal values, as DTensors and DDP promise.
    """

    name: str
    problem: str = ""
    dtype: str = ""
    item_bytes: int = 0
    shape: tuple[int, ...] = ()
    ranges: Ranges | None = None
    memory: tuple[int, ...] = ()
    is_replica: bool = False


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A source rank's part of a tensor, at offset `at` of the bytes that the rank gives."""

    name: str
    dtype: str
    ranges: Ranges
    at: int


class Share(msgspec.Struct, frozen=True, array_like=True):
    """The pieces that one source rank gives, and their size in bytes."""

    rank: int
    pieces: tuple[Piece, ...]
    num_bytes: int


class _WeightsRequest(FeatureRequest, frozen=True):
    handler: ClassVar[str] = "weights"


class DescribeTensors(_WeightsRequest, frozen=True):
    """Ask ranks for the `TensorPart` of each tensor in an expression's value, as msgpack.

    `is_target`: the tensors will be written. `copies`: the copies under way; ranks drop the pieces
    that they hold of others, which have failed.
    """

    expression: str
    is_target: bool
    copies: tuple[int, ...] = ()


class GiveTensors(_WeightsRequest, frozen=True):
    """Ask source ranks for the bytes of their shares, each as one buffer.

    `ended`: numbers of segments' uses (`segments.Ref.loan`) by copies that have ended on all target
    ranks: these may keep their mappings, but read the bytes no more.
    """

    expression: str
    shares: tuple[Share, ...]
    ended: tuple[int, ...] = ()


class HoldTensors(_WeightsRequest, frozen=True):
    """Ask target ranks to keep a source rank's pieces, in the payload, until `TakeTensors`."""

    copy: int
    pieces: tuple[Piece, ...]
    payload: Pickled


class TakeTensors(_WeightsRequest, frozen=True):
    """Ask target ranks to copy the pieces that they hold into the tensors of an expression's value,
    and to answer with the number of these tensors.
    """

    copy: int
    expression: str


AnyRequest = DescribeTensors | GiveTensors | HoldTensors | TakeTensors


def lengths(ranges: Ranges) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(sum(length for _, length in dim) for dim in ranges)


def volume(ranges: Ranges) -> int:
    """Return the number of elements of a part."""
    return math.prod(lengths(ranges))


def overlaps(first: Ranges, second: Ranges) -> Iterator[tuple[Slices, Slices]]:
    """Yield each block that two parts of one tensor share, as its slices in the first part and in
    the second.
    """
    dims = [_overlaps_along(*pair) for pair in zip(first, second, strict=True)]
    for chosen in itertools.product(*dims):
        yield tuple(a for a, _ in chosen), tuple(b for _, b in chosen)


def shared_volume(first: Ranges, second: Ranges) -> int:
    """Return the number of elements that two parts of one tensor share."""
    return math.prod(
        sum(ours.stop - ours.start for ours, _ in _overlaps_along(*pair))
        for pair in zip(first, second, strict=True)
    )


@functools.lru_cache(1024)  # layers of a model are alike
def _overlaps_along(first: Box, second: Box) -> list[tuple[slice, slice]]:
    found = []
    for (start, length), at in zip(first, _places(first), strict=True):
        for (other, num), place in zip(second, _places(second), strict=True):
            low, high = max(start, other), min(start + length, other + num)
            if low < high:
                ours = slice(at + low - start, at + high - start)
                found.append((ours, slice(place + low - other, place + high - other)))
    return found


def _places(ranges: Box) -> Sequence[int]:
    """Return where each range begins within the part."""
    return [0, *itertools.accumulate(length for _, length in ranges)][: len(ranges)]
