"""Packs functions of the notebook that need nothing but their code: no closure, no defaults, and no
object of the notebook. Each is pickled once, and ranks keep its code object.
"""

from __future__ import annotations

import builtins
import copy
import functools
import linecache
import pickle
import types
from dataclasses import dataclass
from typing import Any

from cloudpickle import cloudpickle

from . import payload

# Limits of the functions that the notebook and each rank keep.
_MAX_KEPT = 256
_MAX_BYTES = 1 << 16
# Globals of the notebook that cloudpickle sends with each function.
_PLACE = ("__package__", "__name__", "__path__", "__file__")
_ATTRIBUTES = ("__qualname__", "__module__", "__doc__", "__annotations__")
_TEXTS = frozenset((str, type(None)))
_CLASSES = frozenset(kind for kind in vars(builtins).values() if type(kind) is type)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed function.

    Attributes:
        code: code of the function; kept, so that no other code gets its id.
        names: global names that the code uses.
        marks: see `_marks_of`.
        source: entry of `linecache` for the code.
        pickled: pickle of the function; empty if it is too large to be kept.
    """

    code: types.CodeType
    names: tuple[str, ...]
    marks: tuple[Any, ...]
    source: Any
    pickled: bytes


_packed: dict[int, _Packed] = {}  # by id of the code


def pack(function: Any) -> bytes:
    """Return the pickle of a function that needs nothing but its code; empty for others.

    A call of such a function must have no other function in its arguments, as functions of one
    pickle share the globals that they set.
    """
    if (
        type(function) is not types.FunctionType
        or function.__module__ != "__main__"
        or function.__closure__ is not None
        or function.__defaults__ is not None
        or function.__kwdefaults__ is not None
        or function.__dict__
        or (marks := _marks_of(function)) is None
    ):
        return b""
    code, known = function.__code__, function.__globals__
    packed, source = _packed.get(id(code)), linecache.cache.get(code.co_filename)
    if packed is None or packed.marks != marks or packed.source is not source:
        names = tuple(cloudpickle._extract_code_globals(code))
        if not known.keys().isdisjoint(names):
            return b""
        pickled = payload.dumps(function, "the function")[0].stream
        pickled = pickled if len(pickled) <= _MAX_BYTES else b""
        if len(_packed) >= _MAX_KEPT:
            _packed.clear()
        packed = _packed[id(code)] = _Packed(code, names, marks, source, pickled)
    return packed.pickled if known.keys().isdisjoint(packed.names) else b""


def _marks_of(function: types.FunctionType) -> tuple[Any, ...] | None:
    """Return what a function's pickle contains beside its code; None if a part of it is neither a
    text nor None nor a class of Python's.
    """
    notes, names = function.__annotations__, (function.__name__, function.__qualname__)
    place = map(function.__globals__.get, _PLACE)
    marks = (*names, function.__doc__, *place, *notes, *notes.values())
    for mark in marks:
        if type(mark) not in _TEXTS and not (type(mark) is type and mark in _CLASSES):
            return None
    return marks


def unpack(pickled: bytes) -> types.FunctionType:
    """Return a new copy of a packed function, with globals of its own; all copies have one code
    object.
    """
    kept, has_source, differing = _load(pickled)
    if has_source and kept.__code__.co_filename not in linecache.cache:
        pickle.loads(pickled)  # registers the source again, which user code has dropped
    function = _copy(kept)
    for name in differing:
        setattr(function, name, copy.copy(getattr(kept, name)))
    return function


def _copy(kept: types.FunctionType) -> types.FunctionType:
    return types.FunctionType(kept.__code__, kept.__globals__.copy(), kept.__name__)


@functools.lru_cache(_MAX_KEPT)
def _load(pickled: bytes) -> tuple[types.FunctionType, bool, list[str]]:
    """Return a packed function, which is never called, whether its source is known, and the names
    of the attributes that its copies (`_copy`) lack.
    """
    function = pickle.loads(pickled)
    new = _copy(function)
    differing = [name for name in _ATTRIBUTES if getattr(new, name) != getattr(function, name)]
    return function, function.__code__.co_filename in linecache.cache, differing
