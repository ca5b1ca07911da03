"""Renders tables for notebooks (HTML) and terminals (text)."""

from __future__ import annotations

import collections
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...controller.failure_summary import describe_state
from ...controller.inspect import Comparison, Spread, compare, describe_odd
from ...wire.inspect import TensorSummary
from ...wire.peer_calls import PEER_RUNS
from ...wire.ranks import count_ranks, describe_groups, format_ranks, group_ranks
from ...wire.segments import format_bytes
from ...wire.status import RankInfo, RankState

if TYPE_CHECKING:
    from ...controller.actors import Spawned
    from ...controller.run import Run

# With more ranks, equal ranks share a row: in tables of status and memory; in the dashboard.
MAX_ROWS, MAX_GRID = 16, 64
# JupyterLab styles table cells, which therefore do not inherit the style of their table.
_CELL = "padding:2px 10px 2px 0;text-align:left;white-space:pre"
_WRAPPING_CELL = _CELL.replace("pre", "pre-wrap") + ";vertical-align:top"
# A table is saved in the notebook's file.
_MAX_HTML_BYTES = 50_000
# Shown part of a dead rank's last output; the rest is in its log.
_NUM_LAST_LINES = 5
_MAX_LAST_LINE = 200
_MAX_LAST_RANKS = 4
_MAX_WAITING = 3  # calls that wait on a rank, in its state


@dataclass(frozen=True)
class Table:
    """A table of text with headers, shown as HTML or text.

    Args:
        headers: headers of the columns.
        rows: rows, with one text per column.
        caption: sentence below the table.
        notes: lines below the caption, unchanged.
        wraps: whether long cells are wrapped at the page's width.
        max_bytes: maximum size of the rows in HTML, in bytes; the last rows are left out.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    notes: Sequence[str] = ()
    wraps: bool = False
    max_bytes: int = _MAX_HTML_BYTES

    def __repr__(self) -> str:
        lines = [self.headers, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headers))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*text, *([self.caption] if self.caption else []), *self.notes])

    def _repr_html_(self) -> str:
        style = _WRAPPING_CELL if self.wraps else _CELL

        def row(cells: Sequence[str], tag: str) -> str:
            inner = "".join(
                f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
                if cell
                else f"<{tag}></{tag}>"
                for cell in cells
            )
            return f"<tr>{inner}</tr>"

        rows: list[str] = []
        left = self.max_bytes
        for cells in self.rows:
            rows.append(row(cells, "td"))
            left -= len(rows[-1].encode())
            if left < 0:
                del rows[-1]
                break
        num_more = len(self.rows) - len(rows)
        more = f"<div>... and {num_more:,} more rows</div>" if num_more else ""
        caption = f"<div>{html.escape(self.caption)}</div>" if self.caption else ""
        notes = (
            f'<pre style="margin:0">{html.escape(chr(10).join(self.notes))}</pre>'
            if self.notes
            else ""
        )
        return (
            '<table class="cellmesh" style="font-family:monospace">'
            f"<thead>{row(self.headers, 'th')}</thead>"
            f"<tbody>{''.join(rows)}</tbody></table>{more}{caption}{notes}"
        )


@dataclass(frozen=True)
class Static:
    """A static view, shown as HTML or text.

    Attributes:
        text: text for terminals.
        html: HTML for viewers, without scripts, and with all texts of users escaped.
    """

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def compact_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    notes: Sequence[str] = (),
    wraps: bool = False,
) -> Table:
    """Return a table without the columns that are empty in every row; the first column stays."""
    keep = [i for i in range(len(headers)) if i == 0 or any(row[i] for row in rows)]
    return Table(
        [headers[i] for i in keep], [[row[i] for i in keep] for row in rows], caption, notes, wraps
    )


def join_tables(tables: Mapping[str, Table], in_use: str) -> Table:
    """Return one table with the rows of the tables of several meshes, each below its mesh's name.

    Args:
        tables: name of a mesh -> its table.
        in_use: name of the mesh in use.
    """
    headers = list(dict.fromkeys(header for table in tables.values() for header in table.headers))
    rows, notes = [], list[str]()
    for name, table in tables.items():
        for row in table.rows:
            cells = dict(zip(table.headers, row, strict=True))
            rows.append([name, *(cells.get(header, "") for header in headers)])
        notes += [table.caption + (", in use" if name == in_use else ""), *table.notes]
    return Table(("mesh", *headers), rows, notes=notes)


@dataclass(frozen=True)
class RankRow:
    """One rank's cells in a table.

    Attributes:
        rank: the rank.
        words: cells that are shown if all ranks of a row have the same text, else counted.
        kind: activity of the rank; ranks of equal kind share a row.
        numbers: cells of which a row shows the range; None for an empty cell.
    """

    rank: int
    words: tuple[str, ...]
    kind: str
    numbers: tuple[float | None, ...] = ()


def ranks_table(
    headers: Sequence[str],
    rows: Sequence[RankRow],
    formats: Sequence[Callable[[float], str]] = (),
    title: str = "",
    notes: Sequence[str] = (),
) -> Table:
    """Return a table with a row per rank or, if there are many ranks, per kind of ranks.

    Args:
        headers: headers of the words, the kind and the numbers.
        rows: one row per rank, ascending.
        formats: functions that format each of the numbers.
        title, notes: sentence and lines below the table.
    """
    if len(rows) <= MAX_ROWS:
        cells = [(str(row.rank), *_cells([row], row.kind, formats)) for row in rows]
        return compact_table(("rank", *headers), cells, title, notes)
    by_rank = {row.rank: row for row in rows}
    groups = group_ranks({row.rank: row.kind for row in rows})
    kinds = sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    cells = [
        (
            count_ranks(ranks),
            f"{len(ranks):,}",
            *_cells([by_rank[rank] for rank in ranks], kind, formats),
        )
        for kind, ranks in kinds
    ]
    return compact_table(("ranks", "number", *headers), cells, title, notes)


def _cells(
    rows: Sequence[RankRow], kind: str, formats: Sequence[Callable[[float], str]]
) -> list[str]:
    """Return the cells of a row that several ranks share."""
    words = [set(column) for column in zip(*(row.words for row in rows), strict=True)]
    numbers = zip(*(row.numbers for row in rows), strict=True)
    return [
        *(each.pop() if len(each) == 1 else f"{len(each)} different" for each in words),
        kind,
        *(_range(rows, *pair) for pair in zip(numbers, formats, strict=True)),
    ]


def _range(
    rows: Sequence[RankRow], column: Sequence[float | None], write: Callable[[float], str]
) -> str:
    pairs = zip(column, (row.rank for row in rows), strict=True)
    known = [(number, rank) for number, rank in pairs if number is not None]
    if not known:
        return ""
    (low, _), (high, rank) = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
    first, last = write(low), write(high)
    return first if first == last else f"{first} … {last} (rank {rank})"


def status_table(title: str, infos: Sequence[RankInfo], states: Mapping[int, RankState]) -> Table:
    """Return the table of ``%dist_status``: a row per rank or, if there are many ranks, per group
    of equal ranks.

    Args:
        title: description of the mesh in a sentence.
        infos: all ranks, as their agents know them.
        states: rank -> its state; ranks that do not answer are missing.
    """
    is_short = len(infos) <= MAX_ROWS
    rows = []
    for info in infos:
        state = states.get(info.rank)
        memory = info.rss_bytes if info.pid else None
        gpu = state.device_bytes if state is not None and _has_gpu(info) else None
        pid = (str(info.pid or "-"),) if is_short else ()
        words = (info.host, *pid, info.device or "-")
        kind = doing(info, state)
        rows.append(RankRow(info.rank, words, kind, (memory, gpu)))
    headers = ("host", *(("pid",) if is_short else ()), "device", "state", "memory", "GPU memory")
    return ranks_table(headers, rows, [format_bytes, format_bytes], title, last_lines(infos))


def last_lines(infos: Sequence[RankInfo]) -> list[str]:
    """Return the last output of ranks that are dead, or whose replacement is still empty."""
    ended = [lines for info in infos if (lines := _last_lines(info))]
    more = len(ended) - _MAX_LAST_RANKS
    lines = [line for lines in ended[:_MAX_LAST_RANKS] for line in lines]
    return [*lines, f"and those of {more} more: `%dist_logs`"] if more > 0 else lines


def _last_lines(info: RankInfo) -> list[str]:
    """Return the last output of a rank that is dead, or whose replacement is still empty."""
    lines = info.last_output.splitlines()[-_NUM_LAST_LINES:]
    if not lines:
        return []
    who = f"rank {info.rank}" if info.phase == "dead" else f"rank {info.rank}'s predecessor"
    return [f"the last lines of {who}:", *(f"    {line[:_MAX_LAST_LINE]}" for line in lines)]


def memory_table(title: str, infos: Sequence[RankInfo], states: Mapping[int, RankState]) -> Table:
    """Return the table of ``%dist_mem``.

    Args:
        title: sentence below the table.
        infos: ranks to show.
        states: rank -> its state; ranks that do not answer are missing.
    """
    headers = (
        "cell", "memory", "peak", "last cell", "peak rose by",
        "GPU allocated", "GPU peak", "GPU reserved", "last cell",
    )  # fmt: skip
    formats = [format_bytes, format_bytes, _change, *[format_bytes] * 4, _change]
    rows = [_memory_row(info, states.get(info.rank)) for info in infos]
    return ranks_table(headers, rows, formats, title)


def _memory_row(info: RankInfo, state: RankState | None) -> RankRow:
    if state is None:
        kind = f"dead: {info.ending}" if info.phase == "dead" else "does not answer"
        return RankRow(info.rank, (), kind, (None,) * 8)
    use = state.memory
    runs = state.run >= 0 and use.execution_count == state.execution_count
    kind = f"In[{use.execution_count}]{' (runs)' if runs else ''}" if use.execution_count else "-"
    host = (use.rss, use.peak_rss, use.cell_rss, use.cell_peak_rss or None)
    gpu = (use.allocated, use.peak_allocated, use.reserved, use.cell_allocated)
    return RankRow(info.rank, (), kind, (*host, *(gpu if _has_gpu(info) else (None,) * 4)))


def _has_gpu(info: RankInfo) -> bool:
    return info.device.startswith("cuda")


def _change(number: float) -> str:
    return f"{'-' if number < 0 else '+'}{format_bytes(abs(number))}"


def doing(info: RankInfo, state: RankState | None) -> str:
    """Return the activity of a rank, or how it ended, in words."""
    if info.phase == "dead":
        return f"dead: {info.ending}"
    if not info.is_heard:
        return f"{info.phase} when its host was heard last"
    if state is None:
        return f"{info.phase}; its control thread does not answer, so a stop may not reach it"
    cell = f"In[{state.execution_count}]: " if state.execution_count else ""
    new = (
        f"; new and empty: its predecessor {info.predecessor_ending}"
        if info.predecessor_ending
        else ""
    )
    calls = [f"{each.title} waits {each.where}".rstrip() for each in state.waiting]
    more = [f"{len(calls) - _MAX_WAITING} more wait"] if len(calls) > _MAX_WAITING else []
    waiting = "".join(f"; {text}" for text in (*calls[:_MAX_WAITING], *more))
    return f"{cell}{describe_state(state)}{waiting}{new}"


def actors_table(
    caption: str,
    actors: Mapping[str, Spawned],
    runs: Iterable[Run[Any]],
    states: Mapping[int, RankState],
) -> Table:
    """Return the table of ``%dist_actors`` of one mesh.

    Args:
        caption: description of the mesh in a sentence.
        actors: name -> the actor.
        runs: the mesh's runs in flight.
        states: rank -> its state; ranks that do not answer are missing.
    """
    titles = {run.number: run.title for run in runs if run.number not in PEER_RUNS}
    rows = []
    for name, actor in actors.items():
        num_calls = sum(title.startswith(f"{name}.") for title in titles.values())
        none = "replaced, and has none" if actor.on_death == "fail" else "is being made again"
        doing = {
            rank: none
            if rank in actor.lost and rank in states
            else _doing_as(name, titles, states.get(rank))
            for rank in actor.rank_set.ranks
        }
        alike = group_ranks(doing)
        texts = [
            text if len(alike) == 1 else f"{format_ranks(ranks)}: {text}"
            for text, ranks in alike.items()
        ]
        where = format_ranks(actor.rank_set.ranks)
        rows.append((name, actor.kind.__name__, where, str(num_calls or ""), " / ".join(texts)))
    return Table(
        ("actor", "class", "ranks", "notebook's calls", "state"), rows, caption, wraps=True
    )


def _doing_as(name: str, titles: Mapping[int, str], state: RankState | None) -> str:
    """Return what a rank does as an actor, in words."""
    if state is None:
        return "dead, or does not answer"
    waits = collections.Counter(
        f"{each.title} waits {each.where}".rstrip()
        for each in state.waiting
        if each.title.startswith(f"{name}.")
    )
    texts = [f"{text} ({number} calls)" if number > 1 else text for text, number in waits.items()]
    title = titles.get(state.run, "")
    own = f"{title}, " if title.startswith(f"{name}.") else ""
    return "; ".join(texts if texts and state.run < 0 else [own + describe_state(state), *texts])


def facts_table(
    expression: str,
    facts: Mapping[int, TensorSummary],
    comparison: Comparison | None = None,
    spread: Spread | None = None,
) -> Table:
    """Return the table of ``%dist_inspect`` for one value: a row for each group of equal ranks.

    Args:
        expression: the inspected expression.
        facts: rank -> its summary of the value.
        comparison: result of comparing replicas; None to compare their digests.
        spread: histograms of the ranks.
    """
    counts = {} if spread is None else spread.counts
    rows = group_ranks(
        {rank: (draw_bars(counts.get(rank, ())), *_value_row(fact)) for rank, fact in facts.items()}
    )
    scale = [] if spread is None else [f"histograms from {spread.low:.4g} to {spread.high:.4g}"]
    return compact_table(
        ("ranks", "histogram", *_VALUE_HEADERS),
        [(format_ranks(ranks), *row) for row, ranks in rows.items()],
        f"{expression}: {sentence_of(facts, comparison)}",
        [*scale, *describe_groups({rank: fact.note for rank, fact in facts.items()})],
    )


def draw_bars(counts: Sequence[int], width: int = 24) -> str:
    """Draw a histogram in one line of text, in which all bins with elements are visible."""
    per = -(-len(counts) // width)
    joined = [sum(counts[at : at + per]) for at in range(0, len(counts), per or 1)]
    most = max(joined, default=0) or 1
    return "".join(_LEVELS[math.ceil(count / most * (len(_LEVELS) - 1))] for count in joined)


def sentence_of(facts: Mapping[int, TensorSummary], comparison: Comparison | None = None) -> str:
    """Return a sentence on one value on all ranks: NaN first, then whether replicas are equal."""
    odd = describe_odd({"": facts})
    return "; ".join([*([odd] if odd else []), str(comparison or compare(facts))])


_LEVELS = " ▁▂▃▄▅▆▇█"
_VALUE_HEADERS = (
    "type", "value", "shape", "here", "at", "dtype", "device", "placements", "grad",
    "memory a rank",
    "min", "max", "mean", "std", "norm", "NaN", "Inf", "zeros",
)  # fmt: skip


def _value_row(fact: TensorSummary) -> tuple[str, ...]:
    kind = fact.kind.rpartition(".")[2] if fact.dtype else fact.kind
    layout = (fact.dtype, fact.device, fact.placements, "yes" if fact.requires_grad else "")
    if fact.is_scalar or not fact.dtype:
        return (kind, fact.text, "", "", "", *layout, *[""] * 9)
    numbers = (fact.min, fact.max, fact.mean, fact.std, fact.norm)
    is_part = fact.local_shape != fact.shape
    return (
        kind,
        "",
        str(tuple(fact.shape or ())),
        str(tuple(fact.local_shape or ())) if is_part else "",
        str(fact.offset) if is_part and fact.offset else "",
        *layout,
        format_bytes(fact.num_bytes),
        *("" if number is None else f"{number:.4g}" for number in numbers),
        *map(str, (fact.num_nan, fact.num_inf, fact.num_zeros)),
    )


def format_time(ns: float) -> str:
    """Format nanoseconds: ``12 µs``, ``3.4 ms``, ``1.25 s``."""
    if ns == 0:
        return "0"
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"
