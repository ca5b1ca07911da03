"""Short texts of values that run nobody's code: of what is not Python's or torch's own, the type only."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any

import torch

_SCALARS = (
    bool, int, float, complex, str, bytes, type(None), type(...), range,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_MAX_CHARS = 60
_MAX_INT_BITS = 200


def quiet_text(value: Any) -> str:
    """A value in short."""
    return _Quiet().repr1(value, 3)


def is_scalar(value: Any) -> bool:
    """Whether a value's repr is all that it is, and is Python's or torch's own."""
    return type(value) in _SCALARS or (
        type(value).__module__ == "numpy" and not hasattr(type(value), "__len__")
    )


class _Quiet(reprlib.Repr):
    """As `reprlib.repr`, but of items in the order they have, as sorting them would compare them."""

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
        if kind in (list, tuple) or is_scalar(x):
            text: str = super().repr1(x, level)
            return text
        if issubclass(kind, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return f"{kind.__name__}{list(x.shape)}"
        return f"<{kind.__name__}>"

    def _items(self, x: Any, level: int, left: str, right: str) -> str:
        if level <= 0 or not x:
            return f"{left}{'...' if x else ''}{right}"
        parts = [self.repr1(each, level - 1) for each in islice(tuple(x), self.maxset)]
        return f"{left}{', '.join([*parts, *['...'] * (len(x) > len(parts))])}{right}"

    def _pairs(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 or not x:
            return "{...}" if x else "{}"
        pairs = islice(list(x.items()), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in pairs]
        return f"{{{', '.join([*parts, *['...'] * (len(x) > len(parts))])}}}"
