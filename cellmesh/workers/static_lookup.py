"""What objects and classes hold, read without running code of theirs."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

_DICTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def held_by(value: Any) -> dict[str, Any]:
    """An object's own ``__dict__``, whatever its class says of it.

    Python's own descriptor gives it, not a property ``__dict__`` of the user's, nor
    ``__getattr__``, which recurses where ``__init__`` has not got far enough.
    """
    for kind in classes_of(type(value)):
        if type(descriptor := vars_of(kind).get("__dict__")) in _DICTS:
            held = descriptor.__get__(value)  # type: ignore[union-attr]
            return held if type(held) is dict else {}
    return {}


def classes_of(kind: type) -> tuple[type, ...]:
    """A class and its bases, in the order in which they are asked."""
    return type.__dict__["__mro__"].__get__(kind)  # type: ignore[no-any-return]


def vars_of(kind: type) -> Mapping[str, Any]:
    """A class's own attributes."""
    return type.__dict__["__dict__"].__get__(kind)  # type: ignore[no-any-return]


def has(kind: type, name: str) -> bool:
    """Whether a class has something under a name, itself or from a base."""
    return any(name in vars_of(each) for each in classes_of(kind))
