"""A value's text in short: as its repr, but no code of the user's runs, and large ones take no
longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

MAX_TEXT = 80
_MAX_DEPTH = 3
_MAX_ITEMS: Mapping[type, int] = {list: 6, tuple: 6, dict: 4, set: 6, frozenset: 6}
# Sets and dicts of more are told in the order they have: sorting takes long.
_MAX_SORTED = 1000
_SORTABLE = (int, float, str, bytes)
_MAX_BITS = 128
_EMPTY: Mapping[type, str] = {set: "set()", frozenset: "frozenset()"}
_BRACKETS: Mapping[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}  # fmt: skip


def name_of(kind: type) -> str:
    """A class's name, whatever its metaclass says."""
    return str(type.__dict__["__name__"].__get__(kind))


def full_name_of(kind: type) -> str:
    """A class's name with its module's."""
    module = type.__dict__["__module__"].__get__(kind)
    name = str(type.__dict__["__qualname__"].__get__(kind))
    return name if type(module) is not str or module == "builtins" else f"{module}.{name}"


def shorten(value: Any) -> tuple[str, bool]:
    """The short text of a value, and whether that says all that the value is."""
    short = _Short()
    text = short.write(value, 0)
    if len(text) > MAX_TEXT:
        return f"{text[: MAX_TEXT - 1]}…", False
    return text, short.is_whole


class _Short:
    def __init__(self) -> None:
        self.is_whole = True

    def write(self, value: Any, depth: int) -> str:
        kind = type(value)
        if value is None or kind in (bool, float, complex, range):
            return repr(value)
        if kind is int:
            bits = value.bit_length()  # to write all digits takes long, and Python refuses to
            return repr(value) if bits <= _MAX_BITS else self._cut(f"<int of {bits:,} bits>")
        if kind in (str, bytes):
            return (
                repr(value)
                if len(value) <= MAX_TEXT
                else self._cut(f"{repr(value[:MAX_TEXT])[:-1]}...")
            )
        if kind in _MAX_ITEMS:
            return self._write_items(value, depth)
        if issubclass(kind, torch.Tensor):
            return self._cut(f"{name_of(kind)}{list(value.shape)}")
        return self._cut(f"<{name_of(kind)}>")

    def _cut(self, text: str) -> str:
        self.is_whole = False
        return text

    def _write_items(self, value: Any, depth: int) -> str:
        kind = type(value)
        if not value:
            return _EMPTY.get(kind, "".join(_BRACKETS[kind]))
        is_cut = len(value) > _MAX_ITEMS[kind]
        if (is_cut and depth) or (kind in (set, frozenset) and len(value) > _MAX_SORTED):
            return self._cut(f"<{kind.__name__} of {len(value):,}>")
        first, last = _BRACKETS[kind]
        if depth == _MAX_DEPTH:
            return self._cut(f"{first}...{last}")
        chosen = itertools.islice(_in_order(value), _MAX_ITEMS[kind])
        if kind is dict:
            parts = [
                f"{self.write(key, depth + 1)}: {self.write(item, depth + 1)}"
                for key, item in chosen
            ]
        else:
            parts = [self.write(item, depth + 1) for item in chosen]
        if is_cut:
            parts.append(self._cut("..."))
        comma = "," if kind is tuple and len(value) == 1 else ""
        return f"{first}{', '.join(parts)}{comma}{last}"


def _in_order(value: Any) -> Iterable[Any]:
    """A collection's items; those of sets and dicts sorted, where that runs no code of the
    user's.
    """
    kind = type(value)
    if kind is dict:
        return _sorted(value.items(), lambda item: item[0])
    return value if kind in (list, tuple) else _sorted(value, lambda item: item)


def _sorted(items: Collection[Any], key: Callable[[Any], Any]) -> Iterable[Any]:
    if len(items) > _MAX_SORTED:
        return items
    kinds = {type(key(item)) for item in items}
    return sorted(items, key=key) if len(kinds) == 1 and kinds.pop() in _SORTABLE else items
