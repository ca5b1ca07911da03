"""The view of ``%dist_timeline``: a picture, and where the time of the last cells went."""

from __future__ import annotations

import html
import os
from pathlib import Path

from ...controller.ranks import Ranks
from ...controller.trace.history import History
from .tables import Static, Table, format_time
from .timeline import draw_text, timeline_of_history
from .timeline_svg import draw_html

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


def show_timeline(ranks: Ranks, num_cells: int, trace: str | None) -> Static:
    """Ask ranks for their last cells, and draw them.

    Raises:
        NoMeshError: the mesh has ended.
        HostError: the trace could not be written.
    """
    history = ranks.timeline(num_cells, trace)
    return static_of(history, [] if trace is None else [describe_trace(Path(trace))])


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
    words = "".join(f"<div>{html.escape(text)}</div>" for text in sentences)
    if not history.cells:
        return Static("\n".join(sentences), words)
    timeline, table = timeline_of_history(history), cell_table(history)
    by_rank = f"<details><summary>by rank</summary>{rank_table(history)._repr_html_()}</details>"
    tables = f'<div style="overflow-x:auto">{table._repr_html_()}{by_rank}</div>'
    return Static(
        "\n".join([draw_text(timeline), "", repr(table), "", *sentences]).rstrip(),
        f"{draw_html(timeline)}{tables}{words}",
    )
