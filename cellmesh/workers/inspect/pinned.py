"""Values of expressions that were run for an inspection: later questions are about these very
values.
"""

from __future__ import annotations

import threading
from typing import Any

# Inspections whose values are kept at once; each may be large.
_MAX_KEPT = 4


class PinnedValues:
    """Values under tokens, the last few that were kept or asked for; used on any thread."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}  # the one that was not asked for longest comes first
        self._lock = threading.Lock()

    def keep(self, token: str, value: Any) -> None:
        """Keep a value; without a token nobody could ask for it."""
        if not token:
            return
        with self._lock:
            gone = [self._values.pop(token, None)]
            while len(self._values) >= _MAX_KEPT:
                gone.append(self._values.pop(next(iter(self._values))))
            self._values[token] = value
        del gone  # outside the lock: it may run code of the user's

    def get(self, token: str) -> Any:
        """The value kept under a token.

        Raises:
            KeyError: it is kept no more, or never was.
        """
        with self._lock:
            value = self._values[token] = self._values.pop(token)
            return value

    def forget(self, tokens: tuple[str, ...]) -> None:
        """Keep these no more."""
        with self._lock:
            gone = [self._values.pop(token, None) for token in tokens]
        del gone
