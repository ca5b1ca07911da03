"""Sums up one progress bar of all ranks, with the slowest rank's progress and the ranks that stand
out, and draws blocks of bars as text and as HTML.

The HTML holds no script; its styles are inline, and of those that viewers leave in notebooks that
they do not trust. Colours are good on light and on dark ground.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...wire.ranks import count_ranks, describe_ranks
from ...wire.user_code import Bar
from .number_folding import join_lines, replace_numbers

RowState = Literal["open", "done", "short", "failed", "stopped"]
# A row is open while a rank goes on, unless a rank has failed or was stopped.
_WORST_FIRST: tuple[RowState, ...] = ("failed", "stopped", "open", "short", "done")

# The slowest rank is named when it is so much behind: in steps and as a part of all, or in seconds.
_GAP_STEPS = 2
_GAP_FRACTION = 0.01
_GAP_S = 1.0
# Of bars that have ended, the slowest rank is named when others were so many times faster.
_SLOWER = 1.1
# What took less is said in tenths of a second.
_BRIEF_S = 10.0


@dataclass(frozen=True)
class ProgressRow:
    """A progress bar that stands for those of several ranks, as it is shown.

    Attributes:
        number: tells it from the run's other bars.
        ranks: which have it.
        title: what stands before it.
        slowest, fastest: how far those ranks are; None where the total is not known.
        counts: ``42-57/100``.
        mark: which ranks stand out, and how; "" if none does.
        stats: rate, and what is left or was needed.
        note: what stands behind it.
        state: of all.
        num_outer: how many bars it is in.
    """

    number: int
    ranks: tuple[int, ...]
    title: str
    slowest: float | None
    fastest: float | None
    counts: str
    mark: str
    stats: str
    note: str
    state: RowState
    num_outer: int


@dataclass(frozen=True)
class Bars:
    """One block of progress bars of a cell, as it is drawn now.

    Attributes:
        number: of the block; drawings of the same number replace each other.
        rows: its bars.
        num_passed: earlier bars of it that ended and are not shown any more.
        num_more: bars that there is no room for.
        closed: none of its bars goes on.
    """

    number: int
    rows: tuple[ProgressRow, ...]
    num_passed: int = 0
    num_more: int = 0
    closed: bool = False


def make_row(number: int, bars: Mapping[int, Bar], died: Mapping[int, str]) -> ProgressRow:
    """Sum up the bars of several ranks as one row; `died` says how ranks died."""
    states = {rank: _state_of(bar, rank in died) for rank, bar in bars.items()}
    going = {rank: bar for rank, bar in bars.items() if states[rank] == "open"} or dict(bars)
    slow = min(going, key=lambda rank: _place(going[rank]))
    fast = max(bars, key=lambda rank: _place(bars[rank]))
    return ProgressRow(
        number=number,
        ranks=tuple(sorted(bars)),
        title=_joined({rank: bar.title for rank, bar in bars.items()}),
        slowest=_fraction(bars[slow]),
        fastest=_fraction(bars[fast]),
        counts=_counts(bars[slow], bars[fast]),
        mark=_mark(bars, states, died, slow, fast),
        stats=_ended_stats(bars) if "open" not in states.values() else _stats(bars[slow], "open"),
        note=_joined({rank: bar.note for rank, bar in bars.items()}),
        state=next(state for state in _WORST_FIRST if state in states.values()),
        num_outer=min(bar.num_outer for bar in bars.values()),
    )


def _state_of(bar: Bar, has_died: bool) -> RowState:
    if bar.state == "open":
        return "failed" if has_died else "open"
    if bar.state in ("failed", "stopped"):
        return bar.state
    return "done" if not bar.total or bar.done >= bar.total or bar.state == "removed" else "short"


def _place(bar: Bar) -> float:
    return bar.done / bar.total if bar.total else bar.done


def _fraction(bar: Bar) -> float | None:
    return min(1.0, max(0.0, bar.done / bar.total)) if bar.total > 0 else None


def _mark(
    bars: Mapping[int, Bar],
    states: Mapping[int, RowState],
    died: Mapping[int, str],
    slow: int,
    fast: int,
) -> str:
    """Return a text that describes the ranks that stand out: slow or failed ones."""
    lost = sorted(rank for rank in bars if states[rank] == "failed" and rank in died)
    failed = sorted(rank for rank in bars if states[rank] == "failed" and rank not in died)
    stopped = sorted(rank for rank in bars if states[rank] == "stopped")
    said = [f"rank {rank} {died[rank]}" for rank in lost[:3]]
    said += [f"{describe_ranks(lost[3:])} died"] if lost[3:] else []
    said += [f"{describe_ranks(failed)} failed"] if failed else []
    if stopped:
        verb = "stopped" if said else "interrupted"
        said.append(verb if len(stopped) == len(bars) else f"{describe_ranks(stopped)} {verb}")
    if said:
        return ", ".join(said)
    if states[slow] != "open" or not _is_behind(bars[slow], bars[fast]):
        return ""
    last = tuple(sorted(rank for rank in bars if _place(bars[rank]) == _place(bars[slow])))
    return f"{describe_ranks(last)} slowest"


def _is_behind(slow: Bar, fast: Bar) -> bool:
    gap = (_place(fast) - _place(slow)) * (slow.total or 1)
    if slow.rate > 0 and gap / slow.rate >= _GAP_S:
        return True
    return gap >= _GAP_STEPS and (not slow.total or gap / slow.total >= _GAP_FRACTION)


def _counts(slow: Bar, fast: Bar) -> str:
    unit = slow.unit if slow.unit not in ("", "it") else ""
    size = f"{unit}" if slow.divisor else (f" {unit}" if unit else "")
    low, high = format_count(slow.done, slow.divisor), format_count(fast.done, fast.divisor)
    if not slow.total:
        reach = low if low == high else f"{low}-{high}"
        return f"{reach}{size}" if size else f"{reach} it"
    total = format_count(slow.total, slow.divisor)
    if slow.total != fast.total and low != high:
        return f"{low}/{total}{size} - {high}/{format_count(fast.total, fast.divisor)}{size}"
    return f"{low if low == high else f'{low}-{high}'}/{total}{size}"


def _stats(bar: Bar, state: RowState) -> str:
    rate = _rate(bar)
    if state != "open":
        brief = bar.elapsed_s < _BRIEF_S
        time = f"in {bar.elapsed_s:.1f} s" if brief else f"in {format_time(bar.elapsed_s)}"
    elif bar.total and bar.rate > 0:
        time = f"{format_time((bar.total - bar.done) / bar.rate)} left"
    else:
        time = format_time(bar.elapsed_s)
    return f"{rate}, {time}" if rate else time


def _ended_stats(bars: Mapping[int, Bar]) -> str:
    """Return the rates of ranks that have ended a bar, how long the last of them needed, and which
    was the slowest.
    """
    longest = max(bars.values(), key=lambda bar: bar.elapsed_s)
    rated = [rank for rank, bar in sorted(bars.items()) if bar.rate > 0]
    if not rated:
        return _stats(longest, "done")
    low = min(rated, key=lambda rank: bars[rank].rate)
    slow, fast = bars[low], max((bars[rank] for rank in rated), key=lambda bar: bar.rate)
    if fast.rate < _SLOWER * slow.rate:
        return _stats(msgspec.structs.replace(longest, rate=slow.rate), "done")
    time = _stats(msgspec.structs.replace(longest, rate=0.0), "done")
    return f"{_rate(slow)} … {_rate(fast)}, {time}, rank {low} slowest"


def _rate(bar: Bar) -> str:
    return format_rate(bar.rate, bar.unit, bar.divisor)


def _joined(texts: Mapping[int, str]) -> str:
    """Return one text for those of ranks, with the span of each number in which they differ."""
    lines = sorted(texts.items())
    if len({replace_numbers(text) for text in texts.values()}) == 1:
        return join_lines(lines)
    return f"{lines[0][1]}…"


def format_count(number: float, divisor: int = 0) -> str:
    """Format a number of steps or, where there is a divisor, of bytes."""
    if not divisor:
        is_whole = abs(number) < 1e15 and number == int(number)
        return f"{int(number):,}" if is_whole else f"{number:.4g}"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < divisor:
            return f"{number:.3g}{prefix}"
        number /= divisor
    return f"{number:.3g}P"


def format_rate(rate: float, unit: str, divisor: int = 0) -> str:
    """Format a rate: ``12.1 it/s``, or ``3.2 s/it`` if it is slow; "" if it is unknown."""
    if rate <= 0 or not math.isfinite(rate):
        return ""
    unit = unit or "it"
    if divisor:
        return f"{format_count(rate, divisor)}{unit}/s"
    if rate >= 1:
        return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"
    return f"{1 / rate:.3g} s/{unit}"


def format_time(seconds: float) -> str:
    """Format seconds: ``0:05``, ``1:02:03``."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ---------------------------------------------------------------- drawing

_WIDTH = 10
_BLOCKS = " ▏▎▍▌▋▊▉█"
_COLOURS: dict[RowState, str] = {
    "open": "#3b82f6",
    "done": "#22a06b",
    "short": "#8b8b8b",
    "stopped": "#d08700",
    "failed": "#e5484d",
}
_BEHIND = "#d08700"
_GROUND = "rgba(128,128,128,0.25)"
_SOFT = "opacity:0.65"


def as_lines(bars: Bars) -> list[str]:
    """Return a block of progress bars as text, a line for each bar."""
    lines = [passed] if (passed := _passed_text(bars)) else []
    width = max((len(_head(row)) for row in bars.rows), default=0)
    lines += [_line(row, width) for row in bars.rows]
    return [*lines, f"… {bars.num_more} more"] if bars.num_more else lines


def as_html(bars: Bars) -> str:
    """Return a block of progress bars as HTML."""
    width = max((len(_head(row)) for row in bars.rows), default=0)
    parts = []
    passed = _passed_text(bars)
    if passed:
        parts.append(f'<div style="{_SOFT}">{html.escape(passed)}</div>')
    parts += [_row_html(row, width) for row in bars.rows]
    if bars.num_more:
        parts.append(f'<div style="{_SOFT}">… {bars.num_more} more</div>')
    style = "font-family:monospace;font-size:12px;line-height:18px;margin:2px 0"
    return f'<div style="{style}">{"".join(parts)}</div>'


# ---- text


def _head(row: ProgressRow) -> str:
    """Return a bar's label and title, indented below the bar that it is nested in."""
    return f"[{count_ranks(row.ranks)}] {'  ' * row.num_outer}{row.title}".rstrip()


def _passed_text(bars: Bars) -> str:
    if not bars.num_passed:
        return ""
    return f"… {bars.num_passed:,} earlier bar{'s' if bars.num_passed > 1 else ''}"


def _line(row: ProgressRow, width: int) -> str:
    parts = [f"{_head(row):{width}}"]
    if row.slowest is not None:
        parts.append(f"{_percent(row.slowest):>5} |{_blocks(row.slowest)}|")
    parts.append(row.counts)
    end = [f"[{row.mark}]"] if row.mark else []
    end += [text for text in (row.stats, row.note) if text]
    return "  ".join([" ".join(parts), *end])


def _percent(fraction: float) -> str:
    return f"{math.floor(fraction * 100 + 1e-9)} %"


def _blocks(fraction: float) -> str:
    whole, part = divmod(int(fraction * _WIDTH * 8 + 1e-9), 8)
    bar = _BLOCKS[8] * whole + (_BLOCKS[part] if part else "")
    return f"{bar:{_WIDTH}}"


# ---- HTML


def _row_html(row: ProgressRow, width: int) -> str:
    pieces = [
        f'<span style="display:inline-block;min-width:{width * 0.62:.1f}em;margin-right:8px">'
        f'<span style="{_SOFT}">[{count_ranks(row.ranks)}]</span> '
        f"{'&nbsp;' * (2 * row.num_outer)}{html.escape(row.title)}</span>"
    ]
    if row.slowest is not None and row.fastest is not None:
        pieces.append(
            '<span style="display:inline-block;min-width:3.1em;text-align:right;margin-right:8px">'
            f"{_percent(row.slowest)}</span>"
        )
        pieces.append(_track(row.slowest, row.fastest, _COLOURS[row.state]))
    pieces.append(_span(row.counts, "margin-right:12px"))
    if row.mark:
        colour = _COLOURS[row.state] if row.state in ("failed", "stopped") else _BEHIND
        pieces.append(_span(row.mark, f"color:{colour};font-weight:bold;margin-right:12px"))
    pieces.append(_span(row.stats, f"{_SOFT};margin-right:12px"))
    if row.note:
        pieces.append(_span(row.note, ""))
    return f"<div>{''.join(pieces)}</div>"


def _span(text: str, style: str) -> str:
    kept = html.escape(text).replace("  ", "&nbsp; ")
    return f'<span style="display:inline-block;{style}">{kept}</span>'


def _track(slowest: float, fastest: float, colour: str) -> str:
    """Return a bar as HTML: filled up to the slowest rank, pale up to the fastest."""
    fill = "display:inline-block;height:10px;vertical-align:top"
    pieces = f'<span style="{fill};width:{slowest * 100:.1f}%;background-color:{colour}"></span>'
    if fastest > slowest:
        width = (fastest - slowest) * 100
        pieces += (
            "<span "
            f'style="{fill};width:{width:.1f}%;background-color:{colour};opacity:0.35"></span>'
        )
    style = (
        "display:inline-block;width:120px;height:10px;vertical-align:middle;font-size:0;"
        "line-height:10px;white-space:nowrap;border-radius:2px;overflow:hidden;margin-right:8px;"
        f"background-color:{_GROUND}"
    )
    return f'<span style="{style}">{pieces}</span>'
