"""Short texts of values that run nobody's code: of what is not Python's or torch's own, the type
only.
"""

from __future__ import annotations

import collections
import contextlib
import reprlib
import types
from itertools import islice
from typing import Any

import torch

_SCALARS = (
    bool, int, float, complex, str, bytes, type(None), type(...), range,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_NAMED = (types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
# Containers of more items tell how many they are.
FEW = 100
# Those of more are not told as a whole.
_MAX_WHOLE = 10_000
_MAX_CHARS = 60
_MAX_TEXT = 200
_MAX_INT_BITS = 200


def quiet_text(value: Any) -> str:
    """A value in short."""
    text = _Quiet().repr1(value, 3)
    if type(value) in _CONTAINERS and len(value) > FEW:
        text = f"{len(value):,} items: {text}"
    text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
    return text.encode("utf-8", "replace").decode()  # half of a character cannot be sent to a page


def whole_text(value: Any) -> str:
    """All that a value is; "" where telling it takes code of the user's, or much time."""
    kind = type(value)
    items: list[Any] = [value]
    if kind in (list, tuple, dict):
        if len(value) > _MAX_WHOLE:
            return ""
        items = (
            [part for pair in dict.items(value) for part in pair] if kind is dict else list(value)
        )
    if not all(map(is_scalar, items)):
        return ""
    try:
        return f"{kind.__name__} {items!r}"
    except ValueError:  # a number of thousands of digits
        return ""


def is_scalar(value: Any) -> bool:
    """Whether a value's repr is all that it is, and is Python's or torch's own."""
    return type(value) in _SCALARS or (
        type(value).__module__ == "numpy" and not hasattr(type(value), "__len__")
    )


class _Quiet(reprlib.Repr):
    """As `reprlib.repr`, but of items in the order they have, as sorting them would compare
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_CHARS

    def repr1(self, x: Any, level: int) -> str:
        kind = type(x)
        if kind is int and x.bit_length() > _MAX_INT_BITS:
            return f"<int of {x.bit_length():,} bits>"
        if kind in (set, frozenset):
            return self._items(x, level, *(("{", "}") if kind is set else ("frozenset({", "})")))
        if kind is dict:
            return self._pairs(x, level)
        if kind is collections.deque:
            return self._items(x, level, "deque([", "])")
        if kind in (list, tuple) or is_scalar(x):
            text: str = super().repr1(x, level)
            return text
        if issubclass(kind, torch.Tensor):
            with (
                torch._C.DisableTorchFunctionSubclass(),
                contextlib.suppress(Exception),
            ):  # without a shape
                return f"{kind.__name__}{list(x.shape)}"
        if kind in _NAMED or kind is type:
            return f"<{kind.__name__} {x.__qualname__}>"
        if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
            return f"array{list(x.shape)} of {x.dtype}"
        return f"<{kind.__name__}>"

    def _items(self, x: Any, level: int, left: str, right: str) -> str:
        if level <= 0 or not x:
            return f"{left}{'...' if x else ''}{right}"
        parts = [self.repr1(each, level - 1) for each in tuple(islice(x, self.maxset))]
        return f"{left}{', '.join([*parts, *['...'] * (len(x) > len(parts))])}{right}"

    def _pairs(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 or not x:
            return "{...}" if x else "{}"
        pairs = islice(list(x.items()), self.maxdict)
        parts = [
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in pairs
        ]
        return f"{{{', '.join([*parts, *['...'] * (len(x) > len(parts))])}}}"
