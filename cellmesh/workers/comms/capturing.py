"""What is printed and displayed within an ipywidgets `Output`: it becomes the widget's state.

In a kernel the front end picks it from the kernel's messages, by the message that they answer. A
rank's output reaches the notebook folded and in other messages, so the rank itself puts it where it
belongs.
"""

from __future__ import annotations

import contextvars
import json
from typing import Any

from ...stdlib import threading, time
from ...wire.messages import DisplayKind, StreamName

# What one widget holds at most; the oldest goes.
MAX_BYTES = 200_000
# How long changes are gathered; the first after a pause is shown at once.
GATHER_S = 0.1


class Capture:
    """The output that goes into one widget, from ``with output:`` on; shown on its run's thread or
    a timer's.

    Args:
        widget: the `Output`.
        run: what is executed.
    """

    def __init__(self, widget: Any, run: int) -> None:
        self.run = run
        self._widget = widget
        self._outputs: list[dict[str, Any]] = [dict(output) for output in widget.outputs]
        self._ids: dict[str, int] = {}
        self._clears = False
        self._is_shown = True
        self._shown_at = float("-inf")
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()

    def add_text(self, stream: StreamName, text: str) -> None:
        """Take in what is printed."""
        with self._lock:
            self._clear_if_due()
            last = self._outputs[-1] if self._outputs else {}
            if last.get("output_type") == "stream" and last.get("name") == stream:
                self._outputs[-1] = {
                    **last,
                    "text": _after_returns(last["text"] + text)[-MAX_BYTES:],
                }
            else:
                self._outputs.append(
                    {"output_type": "stream", "name": stream, "text": _after_returns(text)}
                )
            self._changed()

    def add_display(self, kind: DisplayKind, bundle: bytes, display_id: str) -> None:
        """Take in what is displayed, updated or cleared."""
        with self._lock:
            self._add_display(kind, bundle, display_id)

    def show(self) -> None:
        """Give the widget what has not been shown."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if not self._is_shown:
                self._is_shown = True
                self._shown_at = time.monotonic()
                self._trim()
                self._widget.outputs = tuple(self._outputs)

    def _add_display(self, kind: DisplayKind, bundle: bytes, display_id: str) -> None:
        if kind == "clear":
            self._clears = True
            if bundle != b"wait":
                self._clear_if_due()
                self._changed()
            return
        content = json.loads(bundle, parse_constant=lambda name: None)  # NaN is no JSON
        output = {
            "output_type": "display_data",
            "data": content["data"],
            "metadata": content["metadata"],
        }
        if kind == "update":
            if display_id in self._ids:
                self._outputs[self._ids[display_id]] = output
                self._changed()
            return
        self._clear_if_due()
        if display_id:
            self._ids[display_id] = len(self._outputs)
        self._outputs.append(output)
        self._changed()

    def _changed(self) -> None:
        self._is_shown = False
        if time.monotonic() - self._shown_at >= GATHER_S:
            self.show()
        elif self._timer is None:
            self._timer = threading.Timer(GATHER_S, self.show)
            self._timer.daemon = True
            self._timer.start()

    def _clear_if_due(self) -> None:
        if self._clears:
            self._clears = False
            self._outputs, self._ids = [], {}

    def _trim(self) -> None:
        sizes = [len(json.dumps(output, default=str)) for output in self._outputs]
        while len(sizes) > 1 and sum(sizes) > MAX_BYTES:
            del self._outputs[0], sizes[0]
            self._ids = {name: at - 1 for name, at in self._ids.items() if at}


_captures: contextvars.ContextVar[tuple[Capture, ...]] = contextvars.ContextVar(
    "cellmesh_captures", default=()
)


def begin_capture(widget: Any, run: int) -> Capture:
    """From now on, what this thread's run prints and displays goes into a widget."""
    capture = Capture(widget, run)
    _captures.set((*(c for c in _captures.get() if c.run == run), capture))
    return capture


def end_capture(capture: Capture) -> None:
    """No more of it."""
    _captures.set(tuple(each for each in _captures.get() if each is not capture))
    capture.show()


def captured_text(run: int, stream: StreamName, text: str) -> bool:
    """Give a widget what is printed; False if none takes it."""
    capture = _current(run)
    if capture is not None:
        capture.add_text(stream, text)
    return capture is not None


def captured(run: int, kind: DisplayKind, bundle: bytes, display_id: str) -> bool:
    """Give a widget what is displayed; False if none takes it."""
    capture = _current(run)
    if capture is not None:
        capture.add_display(kind, bundle, display_id)
    return capture is not None


def _current(run: int) -> Capture | None:
    captures = _captures.get()
    return captures[-1] if captures and captures[-1].run == run else None


def _after_returns(text: str) -> str:
    """What is left of lines that were written over (progress bars)."""
    if "\r" not in text:
        return text
    *lines, last = text.replace("\r\n", "\n").split("\n")
    kept = [line.rstrip("\r").rpartition("\r")[2] for line in (*lines, last)]
    return "\n".join(kept) + ("\r" if last.endswith("\r") else "")
