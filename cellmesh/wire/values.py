"""Messages that carry values to ranks and back, the parts of tensors that ranks hold, and requests
to save variables as a checkpoint and to load them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from .verbs import FeatureRequest, Pickled, Verb, WorkVerb

Box = tuple[tuple[int, int], ...]


class Part(msgspec.Struct, frozen=True):
    """One rank's part of a value that the controller gathers from several ranks.

    Attributes:
        value: the rank's part; None if another rank sends the same part.
        shape: shape of the whole DTensor; None for a plain value.
        box: position of the part in the whole, ``(start, length)`` for each dim.
        runs: for each dim, ``(start, length)`` of each box, if the part consists of several boxes,
            as with FSDP2 over tensor parallelism; () if it is one box.
    """

    value: Any
    shape: tuple[int, ...] | None = None
    box: Box = ()
    runs: tuple[Box, ...] = ()

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield, for each contiguous block of a shard, its slices in the whole and in the shard."""
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


def part_along(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return start and length of one part of a dim that is split as by ``torch.tensor_split``."""
    size, num_longer = divmod(length, num_parts)
    return index * size + min(index, num_longer), size + (index < num_longer)


class PushNames(WorkVerb, frozen=True):
    """Ask a rank to bind the names of a pickled dict to its values in the user's namespace."""

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled


class PushParts(WorkVerb, frozen=True):
    """Ask a rank to bind the names of a pickled dict to its own parts of the tensors and arrays in
    it, split along `dim` among `ranks`, or to DTensors with `placements`.

    Parts are in the order of `ranks`. A placement is a dim to shard, or None to replicate, for each
    dim of the mesh.
    """

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled
    ranks: tuple[int, ...]
    dim: int
    placements: tuple[int | None, ...] | None = None


class GatherParts(WorkVerb, frozen=True):
    """Ask a rank for its `Part` of an expression's value; the controller joins all ranks' parts."""

    run: int
    expression: str


class PullNames(WorkVerb, frozen=True):
    """Ask a rank for the value of an expression in its namespace."""

    run: int
    expression: str


class Chunk(Verb, frozen=True):
    """A part of a segment's bytes, sent to a process on another host, which joins the parts.

    The frame that follows belongs at offset `at` of the segment of `loan`; `num_left` bytes of the
    segment follow in later chunks.
    """

    num_buffers: ClassVar[int] = 1

    loan: int
    at: int
    num_left: int


class Taken(Verb, frozen=True):
    """Acknowledge a `Chunk` of another rank."""

    loan: int
    at: int


class Unwanted(Verb, frozen=True):
    """Report that the rest of a segment need not be sent, as no message needs it any more."""

    loan: int


class _CheckpointRequest(FeatureRequest, frozen=True):
    handler: ClassVar[str] = "checkpoint"


class CheckSave(_CheckpointRequest, frozen=True):
    """Ask a rank whether it can save these variables to a path; it answers why not, or "". No
    collective.
    """

    names: tuple[str, ...]
    path: str


class SaveNames(_CheckpointRequest, frozen=True):
    """Ask ranks to save these variables to a path; a collective."""

    names: tuple[str, ...]
    path: str


class CheckLoad(_CheckpointRequest, frozen=True):
    """Ask a rank whether it can load these variables from a path; it answers why not, or "". No
    collective.
    """

    names: tuple[str, ...]
    path: str


class LoadNames(_CheckpointRequest, frozen=True):
    """Ask ranks to load these variables (none given: all saved ones) in place, and to answer with
    the names of those loaded; a collective.
    """

    fills: ClassVar[bool] = True

    names: tuple[str, ...]
    path: str


CheckpointRequest = CheckSave | SaveNames | CheckLoad | LoadNames
