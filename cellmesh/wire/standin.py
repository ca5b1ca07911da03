"""A replacement for a value that was too large to keep."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn

from ..errors import HostError
from .messages import Pickled


class _Lost:
    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> Any:
        return complain, (self._text,)


def complain(text: str) -> NoReturn:
    """Raise `HostError`; unpickling a stand-in calls this."""
    raise HostError(text)


def stand_in(text: str) -> Pickled:
    """A pickle that raises `HostError` when it is loaded.

    Args:
        text: what became of the value.
    """
    return Pickled(pickle.dumps(_Lost(text), protocol=5))
