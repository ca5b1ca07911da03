"""Widgets in a notebook whose kernel is played by the test: when they are drawn, and what is left of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cellmesh.controller.looking.metrics import Metrics
from cellmesh.controller.looking.plotting import Plot
from cellmesh.magics.widgets import base
from cellmesh.magics.widgets.base import Static, View, Widget
from cellmesh.magics.widgets.plots import LivePlot
from cellmesh.wire.framing import Parcel
from cellmesh.wire.messages import Logged


class Cell:
    """What is published in a notebook's cell, and on which thread."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[str, dict[str, Any], bool]] = queue.SimpleQueue()

    def publish(self, kind: str, content: dict[str, Any]) -> None:
        self._told.put((kind, content["data"], threading.current_thread() is threading.main_thread()))

    def next(self) -> tuple[str, str, bool]:
        """How the next thing came, its text, and whether on the thread that the test itself is."""
        kind, data, is_here = self._told.get(timeout=10)
        return kind, data["text/plain"], is_here


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    cell = Cell()
    monkeypatch.setattr(base, "is_attended", lambda: True)
    monkeypatch.setattr(base, "cell_publisher", lambda: cell.publish)
    yield cell
    Widget.close_all()


def log(metrics: Metrics, step: float, value: float) -> None:
    metrics.take(1, (0,), Parcel(Logged(1, ("loss",), (step,), ((value,),))))


def test_a_plot_is_not_drawn_on_the_thread_that_reads_what_ranks_say(cell: Cell) -> None:
    plot = Plot(Metrics(), ("loss",), (0,))
    log(plot.metrics, 0, 3.0)
    LivePlot(plot).view._ipython_display_()
    assert cell.next() == ("display_data", "loss [0] 1 points, last 3, least 3, most 3", True)
    log(plot.metrics, 1, 2.0)
    plot.metrics.settle()
    assert cell.next() == ("update_display_data", "loss [0] 2 points, last 2, least 2, most 3", False)
    plot.metrics.settle()  # nothing is new
    plot.shown.end("the mesh has ended")
    kind, text, is_here = cell.next()
    assert (kind, is_here) == ("update_display_data", False)
    assert text.endswith("most 3\nthe mesh has ended")
    log(plot.metrics, 2, 1.0)
    assert plot.metrics._watchers == plot.metrics._settle_watchers == []


def test_what_can_be_drawn_no_more_stands_still_as_it_was(cell: Cell) -> None:
    texts = iter(["seen"])
    view = View(widget := Widget(), lambda: Static(next(texts), "<b>seen</b>"))
    view._ipython_display_()
    view.freeze("it has ended")
    assert [cell.next()[1] for _ in range(2)] == ["seen", "seen\nit has ended"]
    assert widget.ended == "it has ended"
    view.freeze("again")
    view.refresh()
    view._ipython_display_()  # without the widget
    assert cell.next()[:2] == ("display_data", "seen")
    view.close()
    assert widget.comm is None
