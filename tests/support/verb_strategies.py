"""Strategies that make verbs, read off the types of their fields."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from cellmesh.wire.codec import Parcel, num_buffers

_INTS = st.integers(-(2**63), 2**63 - 1)
# Fields that announce frames; the frames must then come, so there are few.
_COUNTS = {"num_buffers", "num_frames"}

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: _INTS,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    type(None): st.none(),
}


def kinds_of(union: Any) -> tuple[type[Any], ...]:
    """The verbs of a union."""
    return typing.get_args(union)


@functools.cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[1:] == (...,):
            return st.lists(values_of(args[0]), max_size=5).map(tuple)
        return st.tuples(*(values_of(arg) for arg in args))
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(arg) for arg in args])
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=5)
    assert issubclass(kind, msgspec.Struct), kind
    hints = typing.get_type_hints(kind)
    fields = {
        name: st.integers(0, 3) if name in _COUNTS else values_of(hints[name])
        for name in kind.__struct_fields__
    }
    return st.builds(kind, **fields)


@functools.cache
def parcels_of(union: Any) -> st.SearchStrategy[Parcel[Any]]:
    """Verbs of a union, each with the buffers that it announces."""

    def add_buffers(verb: Any) -> st.SearchStrategy[Parcel[Any]]:
        count = num_buffers(verb)
        buffers = st.lists(st.binary(), min_size=count, max_size=count).map(tuple)
        return st.builds(Parcel, st.just(verb), buffers)

    return values_of(union).flatmap(add_buffers)
