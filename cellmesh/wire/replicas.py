"""Requests to compare, copy and synchronize tensors of several ranks, and their answers."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from .verbs import FeatureRequest, Pickled

Kind = Literal["parameter", "buffer", "optimizer state", "tensor", "number", "rng", "not wrapped"]


class _Request(FeatureRequest, frozen=True):
    handler: ClassVar[str] = "replicas.handler"


class Check(_Request, frozen=True):
    """Ask ranks for digests of the tensors in an expression's value ("": in all models and
    optimizers).
    """

    expression: str


class Compare(_Request, frozen=True):
    """Ask a rank for the distance between its tensor that `Check` found at `path` and another
    rank's tensor in the payload.
    """

    expression: str
    path: str
    payload: Pickled


class GatherTensor(_Request, frozen=True):
    """Ask a rank for its tensor that `Check` found at `path`, for `Compare` on other ranks."""

    expression: str
    path: str


class Sync(_Request, frozen=True):
    """Ask ranks to make their replicas of an expression's tensors equal to those of rank `source`;
    a collective.
    """

    expression: str
    source: int


class SurveyNames(_Request, frozen=True):
    """Ask a rank which of its variables can be copied to another rank, and why others cannot."""


class GatherNames(_Request, frozen=True):
    """Ask a rank for the values of its variables as one pickle, for `PushNames` on another rank."""

    names: tuple[str, ...]


AnyRequest = Check | Compare | GatherTensor | Sync | SurveyNames | GatherNames


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of one tensor, or one plain value, as found and digested for a `Check`.

    Attributes:
        path: path of the tensor or value, from the expression on: ``model.module.0.weight``.
        kind: kind of the tensor or value; ``not wrapped`` for a whole model or optimizer that was
            left out.
        dtype: element type; "" for plain values.
        shape: shape of the rank's own part.
        digest: digest of the rank's own part, bit for bit; "" if it cannot be read.
        ranks: global ranks that should hold the same part, including this rank; () for all ranks
            that received the request.
        text: a plain value as text.
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
    """Difference between two ranks' parts of a tensor. NaN is equal to NaN.

    Attributes:
        num_differing: number of elements that differ.
        num_elements: number of all elements.
        max_abs: largest absolute difference between elements that are both numbers.
        num_nan: number of elements that are NaN in only one of the two parts.
        first_index: index of the first element that differs; () if none does.
        ours, theirs: values of that element.
    """

    num_differing: int
    num_elements: int
    max_abs: float = 0.0
    num_nan: int = 0
    first_index: tuple[int, ...] = ()
    ours: str = ""
    theirs: str = ""


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report on a `Sync`: how many tensors are equal to the source's now, and how many
    were left unchanged.

    Attributes:
        num_equal: number of tensors and values that are equal to those of the source now.
        num_alone: number of tensors whose part no other rank holds; they were left unchanged.
        num_created: number of parameters whose optimizer state was made, replaced or removed to
            match the source's.
        left_out: tensors and values that could not be made equal, as some ranks do not have them or
            have others in their place.
    """

    num_equal: int
    num_alone: int
    num_created: int
    left_out: tuple[str, ...] = ()
