"""Values on their way to ranks and back, and the memory that they are lent in."""

from __future__ import annotations

from typing import ClassVar

from .verb import Pickled, Verb, WorkVerb


class PushNames(WorkVerb, frozen=True):
    """Bind the names of a pickled dict in the rank's namespace."""

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled


class PushParts(WorkVerb, frozen=True):
    """Bind, to the names of a pickled dict, this rank's parts of the tensors and arrays in it.

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
    """Answer with this rank's `wire.shards.Part` of an expression's value, which the controller
    joins with other ranks'.
    """

    run: int
    expression: str


class PullNames(WorkVerb, frozen=True):
    """Answer with the value of an expression in the rank's namespace."""

    run: int
    expression: str


class Freed(Verb, frozen=True):
    """The rank's last reference to the memory of a segment has gone (`loan`: see
    `wire.segments.Ref`).

    `is_shared`: the rank has forked in between, so that another process may read it still.
    """

    loan: int
    is_shared: bool = False
    run: int = -1


class Mapped(Verb, frozen=True):
    """The rank maps a file of this length, so a truncation of the file kills the rank. For the
    agent.
    """

    path: str
    num_bytes: int
