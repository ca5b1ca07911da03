"""Collects what is printed and displayed within an ipywidgets `Output` into the widget's state.

In a kernel the front end picks it from the kernel's messages. A rank's output reaches the notebook
folded and in other messages, so the rank itself puts it where it belongs.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable
from typing import Any

from ..stdlib import threading, time
from ..wire.output import DisplayKind

# What one widget holds at most; the oldest goes.
MAX_BYTES = 200_000


class Throttle:
    """Calls an action at once after a pause, else once in `period_s`; on the caller's thread or a
    timer's, under the lock.
    """

    def __init__(self, action: Callable[[], None], lock: Any, period_s: float) -> None:
        self._action, self._lock, self._period_s = action, lock, period_s
        self._called_s = float("-inf")
        self._timer: threading.Timer | None = None

    def request(self) -> None:
        """Have the action called: now, or once the period since the last call is over."""
        with self._lock:
            if time.monotonic() - self._called_s >= self._period_s:
                self.call()
            elif self._timer is None:
                self._timer = threading.Timer(self._period_s, self.call)
                self._timer.daemon = True
                self._timer.start()

    def call(self) -> None:
        """Call the action now, on the calling thread."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._called_s = time.monotonic()
            self._action()


class Capture:
    """Collects the output of a run's ``with output:`` block in its widget."""

    def __init__(self, widget: Any, run: int) -> None:
        self.run = run
        self._widget = widget
        self._outputs: list[dict[str, Any]] = [dict(output) for output in widget.outputs]
        self._ids: dict[str, dict[str, Any]] = {}
        self._clears = False
        self._lock = threading.RLock()
        self._throttle = Throttle(self._show, self._lock, 0.1)
        _captures.set((*(c for c in _captures.get() if c.run == run), self))

    def end(self) -> None:
        """Note that the ``with`` block has ended, and send the widget's last state."""
        _captures.set(tuple(each for each in _captures.get() if each is not self))
        self._throttle.call()

    def add_text(self, stream: str, text: str) -> None:
        """Add printed text to the widget's outputs."""
        with self._lock:
            self._clear_if_asked()
            last = self._outputs[-1] if self._outputs else {}
            if last.get("name") == stream:
                last["text"] = _after_returns(last["text"] + text)[-MAX_BYTES:]
            else:
                text = _after_returns(text)
                self._outputs.append({"output_type": "stream", "name": stream, "text": text})
            self._throttle.request()

    def add_display(self, kind: DisplayKind, bundle: bytes, display_id: str) -> None:
        """Add, update or clear a display among the widget's outputs."""
        with self._lock:
            if kind == "clear":
                self._clears = True
                if bundle == b"wait":
                    return
                self._clear_if_asked()
            else:
                content = json.loads(bundle, parse_constant=lambda name: None)  # NaN is no JSON
                shown = {"data": content["data"], "metadata": content["metadata"]}
                if kind == "update":
                    self._ids.get(display_id, {}).update(shown)
                else:
                    self._clear_if_asked()
                    self._outputs.append({"output_type": "display_data", **shown})
                    self._ids[display_id or "\0"] = self._outputs[-1]
            self._throttle.request()

    def _clear_if_asked(self) -> None:
        if self._clears:
            self._clears, self._outputs, self._ids = False, [], {}

    def _show(self) -> None:
        sizes = [len(json.dumps(output, default=str)) for output in self._outputs]
        while len(sizes) > 1 and sum(sizes) > MAX_BYTES:
            del self._outputs[0], sizes[0]
        self._widget.outputs = tuple(dict(output) for output in self._outputs)


_captures: contextvars.ContextVar[tuple[Capture, ...]] = contextvars.ContextVar(
    "cellmesh_captures", default=()
)


def find_capture(run: int) -> Capture | None:
    """Return the innermost `Output` that collects the output of the caller's run, if any."""
    captures = _captures.get()
    return captures[-1] if captures and captures[-1].run == run else None


def is_capturing() -> bool:
    """Return whether an `Output` collects the output of the caller."""
    return bool(_captures.get())


def _after_returns(text: str) -> str:
    """Return lines as a terminal shows them after carriage returns (progress bars)."""
    lines = text.replace("\r\n", "\n").split("\n")
    kept = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return "\n".join(kept) + ("\r" if text.endswith("\r") else "")
