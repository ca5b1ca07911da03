"""Widgets in a notebook whose kernel is played by the test: when they are drawn, and what is left
of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.metrics import Metrics, Plot
from cellmesh.magics.render.tables import Static
from cellmesh.magics.views import widget as base
from cellmesh.magics.views.plot import plot as plots
from cellmesh.magics.views.plot.plot import REFRESH_S, LivePlot
from cellmesh.magics.views.widget import LiveView, Widget
from cellmesh.wire.codec import Parcel
from cellmesh.wire.verbs import Logged


class Cell:
    """What is published in a notebook's cell, and on which thread."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[str, dict[str, Any], bool]] = queue.SimpleQueue()

    def display(self, content: dict[str, Any]) -> None:
        self("display_data", content)

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        self._told.put(
            (kind, content["data"], threading.current_thread() is threading.main_thread())
        )

    def next(self) -> tuple[str, str, bool]:
        """How the next thing came, its text, and whether on the thread that the test itself is."""
        kind, data, is_here = self._told.get(timeout=10)
        return kind, data["text/plain"], is_here


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    cell = Cell()
    monkeypatch.setattr(base, "is_attended", lambda: True)
    monkeypatch.setattr(base, "cell_publisher", lambda: cell)
    yield cell
    Widget.close_all()


def log(metrics: Metrics, step: float, value: float) -> None:
    metrics.take(1, (0,), Parcel(Logged(1, ("loss",), (step,), ((value,),))))


def test_plot_is_not_drawn_on_the_links_thread(cell: Cell) -> None:
    plot = Plot(Metrics(), ("loss",), (0,))
    log(plot.metrics, 0, 3.0)
    LivePlot(plot).view._ipython_display_()
    assert cell.next() == ("display_data", "loss [0] 1 points, last 3, least 3, most 3", True)
    log(plot.metrics, 1, 2.0)
    plot.metrics.settle()
    assert cell.next() == (
        "update_display_data",
        "loss [0] 2 points, last 2, least 2, most 3",
        False,
    )
    plot.metrics.settle()  # nothing is new
    plot.shown.end("the mesh has ended")
    kind, text, is_here = cell.next()
    assert (kind, is_here) == ("update_display_data", False)
    assert text.endswith("most 3\nthe mesh has ended")
    log(plot.metrics, 2, 1.0)
    assert plot.metrics._watchers == []


def test_a_plot_that_takes_long_to_draw_is_drawn_less_often(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, took_s, waited = 0.0, 0.001, list[float]()

    def pack(plot: Plot) -> tuple[list[dict[str, Any]], bytes]:
        nonlocal now_s
        now_s += took_s
        return [], b""

    class Timer:
        def __init__(self, interval: float, function: Callable[[], None]) -> None:
            waited.append(interval)
            self.start = function

    monkeypatch.setattr(plots, "pack", pack)
    monkeypatch.setattr(plots, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(threading, "Timer", Timer)
    LivePlot(plot := Plot(Metrics(), ("loss",), (0,)))
    log(plot.metrics, 0, 3.0)
    took_s = 0.5
    log(plot.metrics, 1, 2.0)
    log(plot.metrics, 2, 1.0)
    assert waited == [REFRESH_S, REFRESH_S, 5.0]


def test_view_that_cannot_be_drawn_freezes_as_it_was(cell: Cell) -> None:
    texts = iter(["seen"])
    view = LiveView(widget := Widget(), lambda: Static(next(texts), "<b>seen</b>"))
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
