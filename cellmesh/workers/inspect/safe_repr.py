"""Formats values as short texts without running user code.

A value whose type is not Python's, torch's or numpy's is shown as the name of its type. Large
values take no longer than small ones.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch

_SCALARS = (
    bool, int, float, complex, str, bytes, type(None), type(...), range,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_BRACKETS: Mapping[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"),
    frozenset: ("frozenset({", "})"), collections.deque: ("deque([", "])"),
}  # fmt: skip
KNOWN = (*_SCALARS, *_BRACKETS)  # types whose values have a text of their own
_EMPTY: Mapping[type, str] = {set: "set()", frozenset: "frozenset()"}
# Texts of containers with more items than this include the number of items.
FEW = 100
_MAX_ITEMS = 6
_MAX_PAIRS = 4
_MAX_DEPTH = 3
_MAX_CHARS = 80
_MAX_LONG_CHARS = 200
_MAX_INT_BITS = 128
# Larger containers have no complete text; larger sets are shown by size only, as the order of their
# items is arbitrary.
_MAX_WHOLE = 10_000
_MAX_SORTED = 1000
_SORTABLE = (int, float, str, bytes)


def name_of(kind: type) -> str:
    """Return a class's name, without running code of its metaclass."""
    return str(type.__dict__["__name__"].__get__(kind))


def full_name_of(kind: type) -> str:
    """Return a class's name with its module, without running code of its metaclass."""
    module = _module_of(kind)
    name = str(type.__dict__["__qualname__"].__get__(kind))
    return name if type(module) is not str or module == "builtins" else f"{module}.{name}"


def quiet_text(value: Any) -> str:
    """Return the text of a value in at most 200 characters; for a long container, with the number
    of items.
    """
    text = _Writer().write(value, 0)
    if type(value) in _BRACKETS and len(value) > FEW and not text.startswith("<"):
        text = f"{len(value):,} items: {text}"
    text = text if len(text) <= _MAX_LONG_CHARS else f"{text[: _MAX_LONG_CHARS - 1]}…"
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent to a page


def shorten(value: Any) -> tuple[str, bool]:
    """Return the text of a value in at most 80 characters, and whether it is complete."""
    writer = _Writer()
    text = writer.write(value, 0)
    if len(text) > _MAX_CHARS:
        return f"{text[: _MAX_CHARS - 1]}…", False
    return text, writer.is_whole


def whole_text(value: Any) -> str:
    """Return the complete text of a value; "" if that would run user code or take long."""
    writer = _Writer(_MAX_WHOLE)
    text = writer.write(value, 0)
    return f"{name_of(type(value))} {text}" if writer.is_whole else ""


def plain(value: Any) -> Any:
    """Return a value for JSON: numbers, texts and None as they are, in lists and dicts as well, and
    one-element tensors and arrays as numbers; everything else as a short text.
    """
    kind = type(value)
    if kind in (bool, int, str, type(None)) or (kind is float and math.isfinite(value)):
        return value
    if kind in (list, tuple):
        return [plain(item) for item in value]
    if kind is dict:
        return {k if type(k) is str else quiet_text(k): plain(item) for k, item in value.items()}
    if issubclass(kind, torch.Tensor) or _module_of(kind) == "numpy":
        with contextlib.suppress(Exception):
            return plain(value.item())
    return quiet_text(value)


def _module_of(kind: type) -> Any:
    return type.__dict__["__module__"].__get__(kind)


class _Writer:
    """Formats one value without running user code.

    Args:
        max_items: maximum number of a container's items, and of a text's characters; None for a
            number that fits a line.

    Attributes:
        is_whole: whether the text so far is complete.
    """

    def __init__(self, max_items: int | None = None) -> None:
        self._max_items = max_items
        self.is_whole = True

    def write(self, value: Any, depth: int) -> str:
        kind = type(value)
        if kind is int and value.bit_length() > _MAX_INT_BITS:
            return self._cut(f"<int of {value.bit_length():,} bits>")
        if kind in (str, bytes) and len(value) > (most := self._max_items or _MAX_CHARS):
            return self._cut(f"{repr(value[:most])[:-1]}...")
        if kind in _SCALARS or (_module_of(kind) == "numpy" and not hasattr(kind, "__len__")):
            return repr(value)
        if kind in _BRACKETS:
            return self._write_items(value, depth)
        if issubclass(kind, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(Exception):
                return self._cut(f"{name_of(kind)}{list(value.shape)}")
        if (_module_of(kind), name_of(kind)) == ("numpy", "ndarray"):
            return self._cut(f"array{list(value.shape)} of {value.dtype}")
        return self._cut(f"<{name_of(kind)}>")

    def _cut(self, text: str) -> str:
        self.is_whole = False
        return text

    def _write_items(self, value: Any, depth: int) -> str:
        kind = type(value)
        first, last = _BRACKETS[kind]
        if not value:
            return _EMPTY.get(kind, first + last)
        max_items = self._max_items or (_MAX_PAIRS if kind is dict else _MAX_ITEMS)
        is_cut = len(value) > max_items
        is_unordered = kind in (set, frozenset) and len(value) > _MAX_SORTED
        if (is_cut and depth) or is_unordered:
            return self._cut(f"<{name_of(kind)} of {len(value):,}>")
        if depth == _MAX_DEPTH:
            return self._cut(f"{first}...{last}")
        # In one call, as the main thread may change the container.
        items = list(value.items()) if kind is dict else list(value)
        if kind in (set, frozenset, dict):  # sort, if that runs no user code
            kinds = {type(item[0] if kind is dict else item) for item in items[:_MAX_SORTED]}
            if len(items) <= _MAX_SORTED and len(kinds) == 1 and kinds.pop() in _SORTABLE:
                items.sort(key=(lambda item: item[0]) if kind is dict else None)
        if kind is dict:
            parts = [
                f"{self.write(key, depth + 1)}: {self.write(item, depth + 1)}"
                for key, item in items[:max_items]
            ]
        else:
            parts = [self.write(item, depth + 1) for item in items[:max_items]]
        if is_cut:
            parts.append(self._cut("..."))
        comma = "," if kind is tuple and len(value) == 1 else ""
        return f"{first}{', '.join(parts)}{comma}{last}"
