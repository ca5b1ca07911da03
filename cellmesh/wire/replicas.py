"""Requests about tensors that should be equal on several ranks, and their answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from .verb import FeatureRequest, Pickled

Kind = Literal["parameter", "buffer", "optimizer state", "tensor", "number", "rng", "not wrapped"]


class Check(FeatureRequest, frozen=True):
    """Ask ranks for digests of the tensors of an expression's value ("": of all models and
    optimizers).
    """

    expression: str


class Compare(FeatureRequest, frozen=True):
    """Ask a rank for the distance between its tensor that `Check` found at `path` and the one in
    the payload.
    """

    expression: str
    path: str
    payload: Pickled


class GatherTensor(FeatureRequest, frozen=True):
    """Ask a rank for its tensor that `Check` found at `path`, for `Compare` on other ranks."""

    expression: str
    path: str


class Sync(FeatureRequest, frozen=True):
    """Ask ranks to make an expression's replicas equal to those of rank `source`; a collective."""

    expression: str
    source: int


class SurveyNames(FeatureRequest, frozen=True):
    """Ask a rank which of its variables can be copied to another rank, and why others cannot."""


class GatherNames(FeatureRequest, frozen=True):
    """Ask a rank for the values of its variables as one pickle, for `PushNames` on another rank."""

    names: tuple[str, ...]


AnyRequest = Check | Compare | GatherTensor | Sync | SurveyNames | GatherNames


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of one tensor, or one plain value, as found and digested for a `Check`.

    Attributes:
        path: where it is, from the expression on: ``model.module.0.weight``.
        kind: what it is; ``not wrapped`` stands for a whole model or optimizer that was left out.
        dtype: element type; "" for plain values.
        shape: shape of the rank's own part.
        digest: digest of it, bit for bit; "" where it cannot be read.
        ranks: the global ranks that should hold the same, this one among them; () for all that were
            asked.
        text: a plain value, as it reads.
        why_differs: why it may differ nevertheless; "" if it must not.
    """

    path: str
    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    digest: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""
    why_differs: str = ""


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """How much two ranks' parts of a tensor differ. NaN is equal to NaN.

    Attributes:
        num_differing: elements that differ.
        num_elements: of how many.
        max_abs: largest absolute difference, where both are numbers.
        num_nan: elements that are NaN in one of the two only.
        first_index: where the first one is that differs; () if none does.
        ours, theirs: its values.
    """

    num_differing: int
    num_elements: int
    max_abs: float = 0.0
    num_nan: int = 0
    first_index: tuple[int, ...] = ()
    ours: str = ""
    theirs: str = ""


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report on a `Sync`: how many tensors are equal now, and what could not be.

    Attributes:
        num_equal: tensors and values that are those of the source now.
        num_alone: tensors of which no other rank holds the same part; they were left as they were.
        num_created: parameters whose optimizer state was made, renewed or removed as the source has
            it.
        left_out: what could not be made equal, as some ranks do not have it or have it otherwise.
    """

    num_equal: int
    num_alone: int
    num_created: int
    left_out: tuple[str, ...] = ()
