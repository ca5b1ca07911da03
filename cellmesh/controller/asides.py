"""What ranks say beside their output: numbers that user code logs, and messages of its widgets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..wire.framing import Parcel
from ..wire.messages import Logged, ToFrontEnd

# Takes the run, the ranks that said it, and the message; called on the link's thread, and must not block.
Listener = Callable[[int, tuple[int, ...], Parcel[Any]], None]

KINDS = (Logged, ToFrontEnd)


class Asides:
    """Who listens to what ranks say beside their output; used on any thread."""

    def __init__(self) -> None:
        self._listeners: dict[type, list[Listener]] = {kind: [] for kind in KINDS}
        self._lock = threading.Lock()

    def listen(self, kind: type, listener: Listener) -> Callable[[], None]:
        """Have a listener told of all messages of a kind.

        Args:
            kind: one of `KINDS`.
            listener: told.

        Returns:
            What ends that.
        """
        with self._lock:
            self._listeners[kind].append(listener)

        def end() -> None:
            with self._lock:
                if listener in self._listeners[kind]:
                    self._listeners[kind].remove(listener)

        return end

    def tell(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        """These ranks said this."""
        with self._lock:
            listeners = tuple(self._listeners[type(parcel.verb)])
        for listener in listeners:
            listener(run, ranks, parcel)
