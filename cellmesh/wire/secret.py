"""Secrets whose `repr` hides them: tracebacks that show local variables show none of a mesh's keys
(IPython's ``%xmode Verbose``).
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


class Secret(str):
    """A key as text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"


class SecretBytes(bytes):
    """Bytes with a key in them: a file's content, or a message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} secret bytes>"


def to_json(value: msgspec.Struct, indent: int | None = None) -> SecretBytes:
    """Return a struct as JSON.

    msgspec would write UTF-8 only; paths in a ticket may have bytes that are none (as surrogates).
    """
    return SecretBytes(json.dumps(value, indent=indent, default=msgspec.structs.asdict).encode())


def from_json(text: bytes, type: type[S]) -> S:
    """Read a struct that `to_json` has written; its text is in no traceback.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return msgspec.convert(json.loads(text), type, dec_hook=_as_secret)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(problem)  # without the frames of `json`, which hold the text


def _as_secret(type: type[Any], value: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError("Expected `str`")
    return type(value)
