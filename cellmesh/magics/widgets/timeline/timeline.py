"""The timeline of the last cells: a widget that zooms; elsewhere a picture and a table."""

from __future__ import annotations

import html
import os
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import traitlets

from ....controller.ranks import Ranks
from ....controller.trace.chrome import trace_of
from ....controller.trace.history import History
from ....controller.trace.operations import lanes_of
from ....errors import CellmeshError
from ....wire.ranks import describe_ranks
from ...render.tables import Table
from ...render.time_axis import format_time
from ...render.timeline import colours_of, draw_html, timeline_of_history
from ...render.timeline_text import draw_text
from ..base.auto_refresh import Worker
from ..base.widget import LiveView, Static, Widget, load_css, load_js

_CELL_HEADERS = ("cell", "took", "compute", "in collectives", "waiting", "straggler")
_CAPTION = (
    "compute, in collectives and waiting are the ranks' means; what they overlap counts in both"
)
_RANK_HEADERS = (
    "rank",
    "compute",
    "in collectives",
    "waiting",
    "last in",
    "each other waited for it",
)


class TimelineWidget(Widget):
    """The ipywidget that draws a history of cells, all of which is in its state, also when saved.

    Times are microseconds, as drawn: what lay between cells is left out.
    """

    _esm = load_js("timeline/operations", "timeline/gantt", "timeline/timeline")
    _css = load_css("timeline/timeline")

    about = traitlets.Dict().tag(sync=True)
    # float64, of each operation: row, kind, cell, begin, end, waited, who was last (-1: unknown),
    # since when the main thread waited (-1: not), whether it goes on, lane. Of each time of
    # computing: row, cell, begin, end.
    operations = traitlets.Bytes().tag(sync=True)
    computing = traitlets.Bytes().tag(sync=True)
    # Why it could not be asked for again.
    problem = traitlets.Unicode("").tag(sync=True)


class LiveTimeline:
    """A timeline in a notebook, with a button that asks the ranks again.

    Args:
        ranks: of whom.
        num_cells: how many of the last cells.
        trace: where it is written as well.
    """

    def __init__(self, ranks: Ranks, num_cells: int, trace: str | None) -> None:
        self._ranks, self._num_cells = ranks, num_cells
        self._worker = Worker()
        self._history = ranks.timeline(num_cells, trace)
        self._note = "" if trace is None else describe_trace(Path(trace))
        self.widget = TimelineWidget(**self._forms())
        self.view = LiveView(self.widget, self._static)
        self.widget.on_msg(lambda _, content, __: self.handle(content))
        ranks.rank_set.session.features.shown.add("timelines", self.view)

    def handle(self, content: dict[str, Any]) -> None:
        """Handle the front end's request to ask the ranks again or to send the trace.

        Does not wait for ranks: messages of other widgets are read on the same thread.
        """
        if content.get("action") == "update":
            self._worker.do(self._update, "update")
        elif content.get("action") == "trace":
            self.widget.send({"trace": "timeline.json"}, [trace_of(self._history)])

    def _update(self) -> None:
        if self.widget.ended:
            return
        try:
            history = self._ranks.timeline(self._num_cells)
        except CellmeshError as error:
            self.widget.problem = str(error)
            return
        self._history = history
        with self.widget.hold_sync():
            self.widget.problem = ""
            for name, value in self._forms().items():
                setattr(self.widget, name, value)

    def _forms(self) -> dict[str, Any]:
        return pack(self._history, [self._note] if self._note else [])

    def _static(self) -> Static:
        return static_of(self._history, [self._note] if self._note else [])


def show_timeline(ranks: Ranks, num_cells: int, trace: str | None) -> LiveView:
    """Ask ranks for their last cells, and show ``%dist_timeline``.

    Raises:
        NoMeshError: the mesh has ended.
        HostError: the trace could not be written.
    """
    return LiveTimeline(ranks, num_cells, trace).view


def describe_trace(path: Path) -> str:
    """Return a sentence that says where a trace was written."""
    whole = path.expanduser().absolute()
    size = f"{whole.stat().st_size / 1e6:.1f} MB"
    name = str(whole).removeprefix(f"{Path.cwd()}{os.sep}")
    return f"trace: {name} ({size}); open it in chrome://tracing or ui.perfetto.dev"


def cell_table(history: History) -> Table:
    """Return a table of where the time of each cell went, the oldest first."""
    rows = []
    for cell in history.cells:
        times = history.times(cell)
        late = times.straggler
        rows.append(
            (
                f"{cell.title} (runs)" if cell.running else cell.title,
                format_time(times.wall_ns),
                format_time(times.compute_ns),
                format_time(times.collectives_ns),
                format_time(times.waiting_ns),
                "" if late is None else _describe_late(late, times.lateness[late].awaited_each_s),
            )
        )
    return Table(_CELL_HEADERS, rows, _CAPTION)


def _describe_late(rank: int, awaited_s: float) -> str:
    return f"rank {rank}, waited for {format_time(awaited_s * 1e9)}"


def rank_table(history: History) -> Table:
    """Return a table of where the time of each rank went, in all cells."""
    lateness = history.lateness()
    num = sum(one.num_last for one in lateness.values())
    rows = []
    for rank in history.ranks:
        computing = sum(e - b for cell in history.cells for b, e in history.computing(rank, cell))
        late = lateness[rank]
        missed = f", never to {late.num_missed}" if late.num_missed else ""
        rows.append(
            (
                str(rank),
                format_time(computing),
                format_time(sum(history.in_collectives_ns(rank, cell) for cell in history.cells)),
                format_time(sum(history.waiting_ns(rank, cell) for cell in history.cells)),
                f"{late.num_last} of {num}{missed}",
                format_time(late.awaited_each_s * 1e9),
            )
        )
    return Table(_RANK_HEADERS, rows)


def static_of(history: History, notes: list[str]) -> Static:
    """Draw a history of cells without a widget: as text, and as a picture with tables."""
    sentences = [text for text in (history.describe(), *history.notes, *notes) if text]
    if not history.cells:
        words = "".join(f"<div>{html.escape(text)}</div>" for text in sentences)
        return Static("\n".join(sentences), words)
    timeline, table = timeline_of_history(history), cell_table(history)
    words = "".join(f"<div>{html.escape(text)}</div>" for text in sentences)
    return Static(
        "\n".join([draw_text(timeline), "", repr(table), "", *sentences]).rstrip(),
        f'{draw_html(timeline)}<div style="overflow-x:auto">{table._repr_html_()}</div>{words}',
    )


def pack(history: History, notes: list[str]) -> dict[str, Any]:
    """Return a history of cells as the state of `TimelineWidget`."""
    rows = {rank: row for row, rank in enumerate(history.ranks)}
    cells = {cell.run: index for index, cell in enumerate(history.cells)}
    kinds: dict[tuple[str, str, tuple[int, ...]], int] = {}
    totals: Counter[str] = Counter()
    numbers, computing = array("d"), array("d")
    for rank, row in rows.items():
        operations = history.operations.get(rank, ())
        for one, lane in zip(operations, lanes_of(operations), strict=True):
            cell = history.cells[cells[one.run]]
            kind = kinds.setdefault((one.name, one.group, one.members), len(kinds))
            totals[one.name] += one.duration_ns
            wait_ns = -1_000 if one.wait_ns is None else one.wait_ns - cell.shift_ns
            begin_ns = one.start_ns - cell.shift_ns
            times = (begin_ns, begin_ns + one.duration_ns, one.waited_ns)
            numbers.extend((row, kind, cells[one.run], *(ns / 1e3 for ns in times)))
            numbers.extend((one.last, wait_ns / 1e3, one.is_open, lane))
        for cell in history.cells:
            for begin, end in history.computing(rank, cell):
                spans = (begin - cell.shift_ns, end - cell.shift_ns)
                computing.extend((row, cells[cell.run], *(ns / 1e3 for ns in spans)))
    colours = colours_of([name for name, _ in totals.most_common()])
    straggler = history.straggler
    about = {
        "ranks": list(history.ranks),
        "cells": [
            {
                "title": cell.title,
                "begin": (cell.begin_ns - cell.shift_ns) / 1e3,
                "end": (cell.end_ns - cell.shift_ns) / 1e3,
            }
            for cell in history.cells
        ],
        "kinds": [
            {
                "name": name,
                "group": group,
                "ranks": _describe_members(members),
            }
            for name, group, members in kinds
        ],
        "names": [
            {"name": name, "colour": colour, "total": totals[name] / 1e3}
            for name, colour in colours.items()
        ],
        "length": history.length_ns / 1e3,
        "straggler": -1 if straggler is None else straggler,
        "sentence": history.describe(),
        "notes": [*history.notes, *notes],
        "caption": _CAPTION,
        "cell_table": _as_lists(cell_table(history)),
        "rank_table": _as_lists(rank_table(history)),
    }
    return {"about": about, "operations": numbers.tobytes(), "computing": computing.tobytes()}


def _describe_members(members: tuple[int, ...]) -> str:
    return describe_ranks(members) if members else "all ranks"


def _as_lists(table: Table) -> list[list[str]]:
    return [list(table.headers), *(list(row) for row in table.rows)]
