"""What is printed and displayed within an `Output` widget."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from cellmesh.wire.output import DisplayKind
from cellmesh.workers import output_widget
from cellmesh.workers.output_widget import Capture, Throttle, find_capture


def captured_text(run: int, stream: str, text: str) -> bool:
    capture = find_capture(run)
    if capture is not None:
        capture.add_text(stream, text)
    return capture is not None


def captured(run: int, kind: DisplayKind, bundle: bytes, display_id: str) -> bool:
    capture = find_capture(run)
    if capture is not None:
        capture.add_display(kind, bundle, display_id)
    return capture is not None


def test_a_throttle_calls_at_once_and_then_once_for_many_requests() -> None:
    calls: list[int] = []
    throttle = Throttle(lambda: calls.append(1), threading.RLock(), 600.0)
    for _ in range(100):
        throttle.request()
    assert len(calls) == 1
    throttle.call()
    assert len(calls) == 2


class Output:
    """As ipywidgets'."""

    def __init__(self) -> None:
        self.outputs: tuple[dict[str, Any], ...] = ()
        self.changed = threading.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "outputs" and "changed" in vars(self):
            self.changed.set()

    def wait_for(self, text: str) -> None:
        while self.text() != text:
            self.changed.clear()
            if self.text() != text:
                assert self.changed.wait(10), self.text()

    def text(self) -> str:
        return "".join(output.get("text", "") for output in self.outputs)


def bundle(text: str) -> bytes:
    return json.dumps({"data": {"text/plain": text}, "metadata": {}}).encode()


def test_a_widget_takes_what_its_run_prints_and_displays() -> None:
    widget = Output()
    capture = Capture(widget, 4)
    assert captured_text(4, "stdout", "a")
    assert captured_text(4, "stdout", "\n")
    assert not captured_text(5, "stdout", "another run's")
    assert captured(4, "display", bundle("shown"), "d")
    assert captured(4, "update", bundle("changed"), "d")
    assert captured_text(4, "stderr", "b")
    capture.end()
    assert not captured_text(4, "stdout", "after")
    assert [output["output_type"] for output in widget.outputs] == [
        "stream",
        "display_data",
        "stream",
    ]
    assert widget.text() == "a\nb"
    assert widget.outputs[1]["data"] == {"text/plain": "changed"}


def test_delayed_clear_waits_for_the_next_output() -> None:
    widget = Output()
    capture = Capture(widget, 4)
    captured_text(4, "stdout", "old")
    captured(4, "clear", b"wait", "")
    assert widget.text() == "old"
    captured_text(4, "stdout", "new")
    widget.wait_for("new")
    captured(4, "clear", b"", "")
    widget.wait_for("")
    assert widget.outputs == ()
    capture.end()


def test_a_flood_that_stops_is_shown_to_its_end() -> None:
    # A loop prints, and then computes for an hour: nothing more is printed, and the block does not
    # end.
    widget = Output()
    capture = Capture(widget, 4)
    for number in range(40):
        captured_text(4, "stdout", f"line {number}")
        captured_text(4, "stdout", "\n")
    widget.wait_for("".join(f"line {number}\n" for number in range(40)))
    capture.end()


def test_innermost_widget_takes_the_output() -> None:
    outer, inner = Output(), Output()
    first = Capture(outer, 4)
    second = Capture(inner, 4)
    captured_text(4, "stdout", "in")
    second.end()
    captured_text(4, "stdout", "out")
    first.end()
    assert (outer.text(), inner.text()) == ("out", "in")


def test_a_progress_bar_is_one_line() -> None:
    widget = Output()
    capture = Capture(widget, 4)
    for text in ("\r10%", "\r20%\r", "30%", "\ndone\n"):
        captured_text(4, "stderr", text)
    capture.end()
    assert widget.text() == "30%\ndone\n"


def test_a_flood_in_a_widget_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_widget, "MAX_BYTES", 1000)
    widget = Output()
    capture = Capture(widget, 4)
    for number in range(1000):
        captured_text(4, "stdout" if number % 2 else "stderr", f"{number}\n" * 10)
    capture.end()
    assert len(json.dumps(widget.outputs)) < 1100
    assert widget.text().endswith("999\n")
