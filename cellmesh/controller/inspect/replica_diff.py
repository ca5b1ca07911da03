"""Compares replicas by digests and, where those differ, measures by how much.

Pure: takes what ranks told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...wire.inspect import TensorSummary
from ...wire.ranks import format_ranks

if TYPE_CHECKING:
    import numpy.typing as npt

Parts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LargestDifference:
    """By how much the elements of replicas differ at most.

    Attributes:
        largest: the largest magnitude of a difference; infinite where one has a NaN or an infinity
            and another has not; 0 where only bits differ that have no value (-0.0, a NaN's).
        is_lower_bound: only some elements were compared.
    """

    largest: float
    is_lower_bound: bool

    def __str__(self) -> str:
        if math.isinf(self.largest):
            return "by a NaN or an infinity"
        if not self.largest:
            return (
                "in no element that was compared"
                if self.is_lower_bound
                else "in bits, not in value"
            )
        return f"by {'at least' if self.is_lower_bound else 'up to'} {self.largest:.4g}"


@dataclass(frozen=True)
class Replicas:
    """A set of ranks that should hold equal values of a tensor, grouped by equal values.

    Attributes:
        shard: what part of the whole they hold, see `TensorSummary`.
        alike: those that are equal, bit for bit; one tuple means that all are.
        difference: how much they differ; None if they do not, or nobody knows.
    """

    shard: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...]
    difference: LargestDifference | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that should hold equal values."""
        return tuple(sorted(rank for ranks in self.alike for rank in ranks))

    @property
    def is_equal(self) -> bool:
        """Whether all ranks hold equal values."""
        return len(self.alike) == 1

    def __str__(self) -> str:
        text = " ≠ ".join(format_ranks(ranks) for ranks in self.alike)
        return text if self.difference is None else f"{text} {self.difference}"


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one tensor on several ranks.

    Attributes:
        replicas: those that should be equal, by the part they hold.
        unread: ranks whose values could not be read, and which are not compared.
    """

    replicas: tuple[Replicas, ...]
    unread: tuple[int, ...] = ()

    @property
    def unequal(self) -> tuple[Replicas, ...]:
        """The sets of ranks that should hold equal values and do not."""
        return tuple(each for each in self.replicas if not each.is_equal)

    def __str__(self) -> str:
        if len(self.unread) + sum(len(each.ranks) for each in self.replicas) == 1:
            return "one rank"
        if self.unequal:
            text = "replicas differ: ranks " + "; ".join(map(str, self.unequal))
            return f"{text}; not compared: {format_ranks(self.unread)}" if self.unread else text
        if self.unread:
            return "not compared: not all of it can be read"
        if all(len(each.ranks) == 1 for each in self.replicas):
            return "sharded: every rank holds a part of its own"
        is_sharded = len(self.replicas) > 1
        return f"{'sharded; ' if is_sharded else ''}replicas are equal, bit for bit"


def compare(facts: Mapping[int, TensorSummary]) -> Comparison:
    """Compare one tensor on several ranks by its digests.

    The same part of DTensors on different meshes may be replicas (over another dim of the mesh) or
    not (stages of a pipeline): they are where they are equal, and else they are let be.

    Args:
        facts: rank -> its view.
    """
    parts: dict[Any, dict[Any, list[int]]] = {}
    unread = []
    for rank, fact in sorted(facts.items()):
        if not fact.digest:
            unread.append(rank)
            continue
        kind = fact.kind if fact.shape is None else ""
        same = (fact.digest, fact.local_shape, fact.dtype, kind)
        parts.setdefault((fact.shard, fact.mesh_ranks), {}).setdefault(same, []).append(rank)
    merged: dict[Any, dict[Any, list[int]]] = {}
    for (shard, mesh_ranks), alike in parts.items():
        key = (shard, next(iter(alike)) if len(alike) == 1 else mesh_ranks)
        for same, ranks in alike.items():
            merged.setdefault(key, {}).setdefault(same, []).extend(ranks)
    return Comparison(
        tuple(
            Replicas(shard, tuple(tuple(sorted(ranks)) for ranks in alike.values()))
            for (shard, _), alike in merged.items()
        ),
        tuple(unread),
    )


def split(parts: Sequence[tuple[int, int]], num_parts: int) -> Parts:
    """Divide ranges of a tensor's elements into about so many pieces of about equal size."""
    total = sum(end - begin for begin, end in parts)
    size = max(1, -(-total // num_parts))
    return tuple(
        (start, min(start + size, end)) for begin, end in parts for start in range(begin, end, size)
    )


def size_of(parts: Sequence[tuple[int, int]]) -> int:
    """Return how many elements some ranges of a tensor have in all."""
    return sum(end - begin for begin, end in parts)


def differing(parts: Parts, digests: Sequence[Sequence[str]]) -> Parts:
    """Return the ranges of elements that are not equal on all ranks, by their digests.

    Args:
        parts: the runs.
        digests: for each rank, one a run.
    """
    return tuple(
        part for part, *of_ranks in zip(parts, *digests, strict=True) if len(set(of_ranks)) > 1
    )


def exact(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert numbers to a type that subtracts them exactly: float64 is too short for 64-bit
    integers.
    """
    import numpy as np

    return values.astype(np.longdouble) if values.dtype.kind in "iu" else values


def largest_difference(values: Sequence[npt.NDArray[Any]]) -> float:
    """Return the largest difference between the first array and the others, see
    `LargestDifference`.
    """
    import numpy as np

    first, largest = exact(values[0]), 0.0
    for other in map(exact, values[1:]):
        with np.errstate(all="ignore"):
            is_same = (first == other) | (np.isnan(first) & np.isnan(other))
            distances = np.abs(first - other)[~is_same]
        if distances.size:
            largest = max(largest, float(np.where(np.isfinite(distances), distances, np.inf).max()))
    return largest
