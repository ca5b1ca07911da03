"""Live plots of logged numbers: lines that grow while a cell runs."""

from __future__ import annotations

import array
import threading
import time
from typing import Any

import traitlets

from ....controller.live_views import do_apart
from ....controller.metrics import Plot, describe_nans, thin
from ...render.plots import draw_html
from ...render.svg import colour_of
from ...render.tables import Static
from ..widget import LiveView, Widget, at_cells_ends, load_css, load_js

# Least time between two drawings, in seconds; longer with many points, which are all drawn again.
REFRESH_S = 0.25


class PlotWidget(Widget):
    """The ipywidget that draws curves; its state, also in a saved notebook, contains the points."""

    _esm = load_js("vendor/uplot/uplot", "elements", "plot/plot")
    _css = load_css("vendor/uplot/uplot", "plot/plot")

    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    # For each line: index of its name, rank, colour, and number of points.
    lines = traitlets.List(traitlets.Dict()).tag(sync=True)
    # All lines' steps and values, float64, one line after the other: steps, then values.
    points = traitlets.Bytes().tag(sync=True)
    # Choices of the user, kept when the page is reloaded.
    mean = traitlets.Bool(False).tag(sync=True)
    log_scale = traitlets.Bool(False).tag(sync=True)
    nans = traitlets.List(traitlets.Unicode()).tag(sync=True)  # a sentence for each name
    hidden = traitlets.List(traitlets.Int()).tag(sync=True)
    zoom = traitlets.List(traitlets.Float()).tag(sync=True)  # the first and last step, [] for all


def pack(plot: Plot) -> tuple[list[dict[str, Any]], bytes]:
    """Return a plot's curves and points as the state of `PlotWidget`."""
    lines: list[dict[str, Any]] = []
    points = array.array("d")
    for index, name in enumerate(plot.names):
        for rank, series in plot.series(name).items():
            few = thin(series)
            lines.append(
                {
                    "name": index,
                    "rank": rank,
                    "colour": colour_of(rank, max(plot.ranks) + 1),
                    "count": len(few.steps),
                    "logged": len(series.steps),
                }
            )
            points.extend(few.steps)
            points.extend(few.values)
    return lines, points.tobytes()


class LivePlot:
    """A plot in a notebook that is updated when ranks log further numbers.

    Args:
        plot: the plot to draw.
    """

    def __init__(self, plot: Plot) -> None:
        self._plot = plot
        self._lock = threading.Lock()
        self._drawing = threading.Lock()  # the last holder draws all points
        self._is_due = False
        self._took_s = 0.0  # duration of the last drawing
        self._is_stale = False  # for viewers without widgets
        self._widget = PlotWidget(names=list(plot.names), mean=plot.mean)
        self.view = LiveView(self._widget, lambda: Static(repr(plot), draw_html(plot)), self._end)
        self._stops = [plot.metrics.watch(self._note)]
        if not self.view.is_attended:
            self._stops.append(at_cells_ends(self._settle))
        self._draw()
        plot.shown.add("plots", self.view)

    def _end(self) -> None:
        for stop in self._stops:
            stop()
        self._draw()

    def _settle(self) -> None:
        """Update the plot for viewers without widgets, at the end of a cell."""
        if not self._is_stale:
            return
        self._is_stale = False
        self._draw()
        with self._drawing:
            self.view.refresh()

    def _note(self, names: frozenset[str] | None) -> None:
        if names is None:
            if self._is_stale and self.view.is_attended:
                do_apart([self._settle])
            return
        with self._lock:
            if names.isdisjoint(self._plot.names):
                return
            self._is_stale = True
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(max(REFRESH_S, 10 * self._took_s), self._draw)
        timer.daemon = True
        timer.start()

    def _draw(self) -> None:
        with self._lock:
            self._is_due = False
        with self._drawing:
            began_at = time.monotonic()
            lines, points = pack(self._plot)
            if points != self._widget.points or lines != self._widget.lines:
                with self._widget.hold_sync():
                    self._widget.lines, self._widget.points = lines, points
                    self._widget.nans = [
                        describe_nans(self._plot.series(name)) for name in self._plot.names
                    ]
            self._took_s = time.monotonic() - began_at
