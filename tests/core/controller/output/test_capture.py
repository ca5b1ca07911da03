"""Output of ranks where the notebook's code captures that of its cell."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher, DisplayPublisher

from cellmesh.controller.output.calling_cell import CapturedSink, find_capture
from cellmesh.controller.output.cell import CellSink
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.fold import Block, Live
from cellmesh.controller.output.printer import Printer

from ....support.blocks import TRACE, Recorder, clear, line, rich


class Captured:
    """A cell whose output is captured as by ``%%capture``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.err, self.display = io.StringIO(), io.StringIO(), CapturingDisplayPublisher()
        monkeypatch.setattr("sys.stdout", self.out)
        monkeypatch.setattr("sys.stderr", self.err)
        self.shell = SimpleNamespace(display_pub=self.display, display_pub_class=DisplayPublisher)
        self.front = Recorder()
        capture = find_capture(self.shell, io.BytesIO)
        assert capture is not None
        self.sink = CapturedSink(capture, CellSink(self.front))

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return list(self.display.outputs)


def test_nothing_is_captured_by_the_kernels_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    shell = SimpleNamespace(display_pub=DisplayPublisher(), display_pub_class=DisplayPublisher)
    assert find_capture(shell, io.StringIO) is None
    monkeypatch.setattr("sys.stdout", None)  # closed
    assert find_capture(shell, io.StringIO) is None


def test_text_is_captured_by_stream_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    captured.sink.show([line(0), line(1, stream="stderr"), rich(0, kind="result", plain="42")])
    captured.sink.note("remark")
    assert captured.out.getvalue() == "[0] text\n[0] 42\n"
    assert captured.err.getvalue() == "[1] text\nremark\n"
    assert captured.front.messages == []


def test_figures_are_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    captured.sink.show([rich(0, png="AAAA"), rich(1, png="BBBB")])
    assert [each["data"]["image/png"] for each in captured.outputs] == ["AAAA", "BBBB"]
    assert "[1]" in captured.outputs[1]["data"]["text/html"]
    assert captured.front.messages == []


def test_an_update_of_a_captured_display_is_captured_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = Captured(monkeypatch)
    captured.sink.show([rich(0, 1, ids=("a", "b"), plain="one")])
    captured.sink.show([rich(0, 1, kind="update", ids=("a", "b"), plain="two")])
    first, second = captured.outputs
    assert (first["update"], second["update"]) == (False, True)
    assert first["transient"] == second["transient"] != {}
    assert second["data"] == {"text/plain": "[0-1] two"}


def test_displays_that_ranks_clear_are_cleared_in_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = Captured(monkeypatch)
    captured.sink.show([rich(0, html="<b>"), clear(0), rich(0, html="<i>")])
    assert [each["data"]["text/html"][-3:] for each in captured.outputs] == ["<i>"]


def test_a_traceback_is_shown_in_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    captured.sink.show([Block((0,), TRACE)])
    assert captured.front.kinds == ["error"]
    assert captured.err.getvalue() == ""


def test_a_redrawn_line_is_captured_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    for text, is_closed, shown in (("50 %", False, ""), ("100 %", True, "[0-1] 100 %\n")):
        captured.sink.show([Block((0, 1), Live((((0, 1), text),), is_closed))])
        assert captured.out.getvalue() == shown
    assert captured.front.messages == []


def test_a_status_line_is_shown_in_the_cell_and_its_last_text_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = Captured(monkeypatch)
    captured.sink.status("starting", False)
    assert captured.front.area == [{"text/plain": "starting"}]
    captured.sink.status("ready", True)
    assert captured.front.area == [{"text/plain": ""}]
    assert captured.out.getvalue() == "ready\n"


def test_advice_is_shown_in_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    Printer((0,), captured.sink).advise("press again")
    assert captured.front.area == [{"text/plain": "press again"}]
    assert captured.err.getvalue() == ""


def test_without_the_capture_output_is_shown_in_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    captured.shell.display_pub = DisplayPublisher()
    captured.sink.show([line(0), rich(0, html="<b>"), line(1, stream="stderr")])
    assert captured.front.kinds == ["stream", "display_data"]
    assert captured.err.getvalue() == "[1] text\n"


def test_a_closed_file_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)
    captured.out.close()
    captured.sink.show([line(0)])
    assert captured.front.area == ["[0] text\n"]


def test_a_file_that_raises_loses_only_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(monkeypatch)

    def fail(text: str) -> int:
        raise OSError("full")

    monkeypatch.setattr(captured.out, "write", fail)
    captured.sink.show([line(0), line(1, stream="stderr")])
    assert captured.err.getvalue() == "[1] text\n"


def test_in_a_terminal_displays_are_captured_and_text_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = Captured(monkeypatch)
    capture = find_capture(captured.shell, None)
    assert capture is not None
    CapturedSink(capture, ConsoleSink()).show([line(0), rich(0, html="<b>"), line(1)])
    assert captured.out.getvalue() == "[0] text\n[1] text\n"
    (shown,) = captured.outputs
    assert shown["data"]["text/html"].endswith("<b>")
