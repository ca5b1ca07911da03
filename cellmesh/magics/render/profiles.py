"""The views of ``%dist_timeline`` and ``%%dist_profile``, with a picture and tables of the time
that was spent, and the lines of ``%%dist --time``.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from ...controller.ranks import Ranks
from ...controller.trace.history import History
from ...controller.trace.operations import find_straggler as find_late
from ...controller.trace.profile import OperatorByRank, Profile
from ...wire.ranks import format_ranks, group_ranks
from ...wire.verbs import Timing
from .tables import Static, Table, format_time
from .timeline import draw_html, draw_text, timeline_of

_CAPTION = (
    "compute, in collectives and waiting are the ranks' means; what they overlap counts in both"
)
_TITLES = {
    "computation": "operator (self time)",
    "communication": "communication (until its end)",
    "device": "GPU kernel",
}
_MAX_NAME = 64
# Least delay with which a rank is reported as slow: in seconds, and as a share of the others' time.
_LATE_S, _LATE_SHARE = 0.005, 0.1
# Least time in imports that is shown, in seconds.
_SHOWN_S = 0.01


def describe_timings(timings: Mapping[int, Timing]) -> str:
    """Return a line for each group of ranks with equal times, and one that names a slow rank.

    Args:
        timings: rank -> its timing.
    """
    alike = group_ranks({rank: _describe(timing) for rank, timing in sorted(timings.items())})
    lines = [f"[{format_ranks(ranks)}] took {text}" for text, ranks in alike.items()]
    late = find_straggler(timings)
    if late is not None:
        others = median(_alone_s(timing) for rank, timing in timings.items() if rank != late)
        own = _seconds(_alone_s(timings[late]))
        lines.append(
            f"rank {late} was the straggler: {own} outside collectives, the others "
            f"{_seconds(others)}"
        )
    return "\n".join(lines)


def find_straggler(timings: Mapping[int, Timing]) -> int | None:
    """Return the rank that took clearly longer than the others outside of collectives, or None.

    In a collective all ranks wait for the last one, so only the remaining time reveals it.
    """
    if len(timings) < 2:
        return None
    late = max(timings, key=lambda rank: _alone_s(timings[rank]))
    others = median(_alone_s(timing) for rank, timing in timings.items() if rank != late)
    over_s = _alone_s(timings[late]) - others
    return late if over_s > max(_LATE_S, _LATE_SHARE * others) else None


def _alone_s(timing: Timing) -> float:
    return timing.elapsed_s - timing.in_collectives_s


def _describe(timing: Timing) -> str:
    text = _seconds(timing.elapsed_s)
    if timing.in_collectives_s:
        text += f", {_seconds(timing.in_collectives_s)} of it in collectives"
    if timing.in_imports_s >= _SHOWN_S:
        text += f", {_seconds(timing.in_imports_s)} in imports"
    return text


def _seconds(seconds: float) -> str:
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def show_timeline(ranks: Ranks, num_cells: int, trace: str | None) -> Static:
    """Ask ranks for their last cells, and draw them.

    Raises:
        NoMeshError: the mesh has ended.
        HostError: the trace cannot be written.
    """
    history = ranks.timeline(num_cells, trace)
    notes = [] if trace is None else [describe_trace(Path(trace))]
    return draw(history, [*history.notes, *notes], [cell_table(history)])


def show_profile(profile: Profile, num_rows: int) -> Static:
    """Draw a profile, with `num_rows` operators of each kind."""
    notes = [] if profile.trace_path is None else [describe_trace(profile.trace_path)]
    tables = [cell_table(profile.history), *operator_tables(profile.operators, num_rows)]
    return draw(profile.history, [*profile.notes, *notes], tables)


def draw(history: History, notes: Sequence[str], tables: Sequence[Table]) -> Static:
    """Draw a history of cells: as text, and as a picture with tables."""
    sentences = [text for text in (history.describe(), *notes) if text]
    words = "".join(f"<div>{html.escape(text)}</div>" for text in sentences)
    if not history.cells:
        return Static("\n".join(sentences), words)
    timeline = timeline_of(history)
    by_rank = f"<details><summary>by rank</summary>{rank_table(history)._repr_html_()}</details>"
    rows = [*(table._repr_html_() for table in tables[:1]), by_rank]
    rows += [table._repr_html_() for table in tables[1:]]
    page = "".join(f'<div style="overflow-x:auto;margin-top:8px">{row}</div>' for row in rows)
    return Static(
        "\n\n".join([draw_text(timeline), *map(repr, tables), "\n".join(sentences)]).rstrip(),
        f"{draw_html(timeline)}{page}{words}",
    )


def describe_trace(path: Path) -> str:
    """Return a sentence with the file and size of a trace."""
    whole = path.expanduser().absolute()
    size = f"{whole.stat().st_size / 1e6:.1f} MB"
    # A file below the notebook's working directory is shown by its relative path.
    name = str(whole).removeprefix(f"{Path.cwd()}{os.sep}")
    return f"trace: {name} ({size}); open it in chrome://tracing or ui.perfetto.dev"


def cell_table(history: History) -> Table:
    """Return a table of the time spent in each cell, the oldest first."""
    rows = []
    for cell in history.cells:
        times = [history.times(rank, cell) for rank in cell.by_rank]
        lateness = history.lateness(cell)
        late = find_late(lateness, history.took_s(cell))
        rows.append(
            (
                f"{cell.title} (runs)" if cell.running else cell.title,
                format_time(cell.end_ns - cell.begin_ns),
                *(format_time(mean(column)) for column in zip(*times, strict=True)),
                ""
                if late is None
                else f"rank {late}, waited for {format_time(lateness[late].awaited_each_s * 1e9)}",
            )
        )
    headers = ("cell", "took", "compute", "in collectives", "waiting", "straggler")
    return Table(headers, rows, _CAPTION)


def rank_table(history: History) -> Table:
    """Return a table of the time spent on each rank, in all cells."""
    lateness = history.lateness()
    num = sum(one.num_last for one in lateness.values())
    rows = []
    for rank, late in lateness.items():
        times = [history.times(rank, cell) for cell in history.cells]
        rows.append(
            (
                str(rank),
                *(format_time(sum(column)) for column in zip(*times, strict=True)),
                f"{late.num_last} of {num}",
                format_time(late.awaited_each_s * 1e9),
            )
        )
    last = ("last in", "each other waited for it")
    return Table(("rank", "compute", "in collectives", "waiting", *last), rows)


def operator_tables(operators: Sequence[OperatorByRank], num_rows: int) -> list[Table]:
    """Return a table for each kind of a profile's operators, its rows in order of their time.

    Args:
        operators: the operators, longest first.
        num_rows: number of operators of each kind.
    """
    tables = []
    for kind, title in _TITLES.items():
        of_kind = [operator for operator in operators if operator.kind == kind]
        if not of_kind:
            continue
        rows = [
            (
                one.name if len(one.name) <= _MAX_NAME else f"{one.name[: _MAX_NAME - 1]}…",
                str(one.num_calls),
                format_time(one.mean_s * 1e9),
                format_time(one.min_s * 1e9),
                format_time(one.max_s * 1e9),
                str(one.max_rank),
            )
            for one in of_kind[:num_rows]
        ]
        left = len(of_kind) - len(rows)
        caption = f"and {left} more: --rows {len(of_kind)}" if left else ""
        tables.append(Table((title, "calls", "mean", "min", "max", "max on rank"), rows, caption))
    return tables
