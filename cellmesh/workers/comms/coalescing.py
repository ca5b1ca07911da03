"""Updates of widgets' states, gathered: of each number or text, the newest is sent.

Other values are all sent. Some widgets give orders by way of their state, as plotly does: a list,
and None right behind it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import numbers
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ...stdlib import threading, time

# How long updates are gathered, so that a loop that counts in a label makes few messages.
GATHER_S = 0.05

# Sends an update of a comm's: name -> its value as JSON.
SendUpdate = Callable[[Any, Mapping[str, str]], None]


class Updates:
    """Gathers the updates of one rank's widgets; used on any thread.

    Args:
        send: sends what has been gathered for one widget.
        shield: entered around what an interrupt must not cut in half.
    """

    def __init__(
        self, send: SendUpdate, shield: AbstractContextManager[Any, Any] | None = None
    ) -> None:
        self._send = send
        self._shield = shield or contextlib.nullcontext()
        self._lock = threading.RLock()
        self._waiting: dict[Any, dict[str, str]] = {}
        self._sent_at = 0.0
        self._timer: threading.Timer | None = None

    def add(self, comm: Any, state: Mapping[str, Any]) -> None:
        """Take in an update; the first after a pause is not kept waiting."""
        # As JSON at once: user code may change a list before it is sent.
        packed = {name: pack(value) for name, value in state.items()}
        with self._shield, self._lock:
            waiting = self._waiting.get(comm, {})
            if any(
                not (_is_plain(waiting[name]) and _is_plain(packed[name]))
                for name in packed.keys() & waiting
            ):
                self._flush()
            self._waiting.setdefault(comm, {}).update(packed)
            if time.monotonic() - self._sent_at > GATHER_S:
                self._flush()
            elif self._timer is None:
                self._timer = threading.Timer(GATHER_S, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Send what has been gathered."""
        if self._waiting:
            with self._shield, self._lock:
                self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        self._sent_at = time.monotonic()
        for comm, state in waiting.items():
            self._send(comm, state)


def pack(value: Any) -> str:
    """A value as JSON, as the notebook's kernel would send it.

    Raises:
        TypeError, ValueError: it has no such form; NaN has none.
    """
    return json.dumps(value, default=_as_json, allow_nan=False)


def _as_json(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    for form in ("tolist", "isoformat"):  # arrays and tensors; dates
        if hasattr(value, form):
            return getattr(value, form)()
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _is_plain(packed: str) -> bool:
    """Whether JSON is a number, a text or a truth value."""
    return packed[0] not in "[{n"
