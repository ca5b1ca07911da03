"""Sums up one progress bar of all ranks: the progress of the slowest, and which ranks stand out.

Pure: the ranks' last words go in, a `ProgressRow` comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...wire.progress import Bar
from ...wire.ranks import count_ranks, describe_ranks

RowState = Literal["open", "done", "short", "failed", "stopped"]

# The slowest rank is named when it is so much behind: in steps and as a part of all, or in seconds.
_GAP_STEPS = 2
_GAP_FRACTION = 0.01
_GAP_S = 1.0
# Of bars that have ended, the slowest rank is named when others were so many times faster.
_SLOWER = 1.1
# What took less is said in tenths of a second.
_BRIEF_S = 10.0


@dataclass(frozen=True)
class Member:
    """One rank's progress in a row that shows all ranks' bar; `fraction` is None without total."""

    rank: int
    fraction: float | None
    text: str
    state: RowState


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
        marked: the ranks that `mark` names.
        members: rank by rank.
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
    marked: tuple[int, ...]
    members: tuple[Member, ...]


def make_row(number: int, bars: Mapping[int, Bar], died: Mapping[int, str]) -> ProgressRow:
    """Sum up the bars of several ranks as one row; `died` says how ranks died."""
    states = {rank: _state_of(bar, rank in died) for rank, bar in bars.items()}
    going = {rank: bar for rank, bar in bars.items() if states[rank] == "open"} or dict(bars)
    slow = min(going, key=lambda rank: _place(going[rank]))
    fast = max(bars, key=lambda rank: _place(bars[rank]))
    mark, marked = _mark(bars, states, died, slow, fast)
    return ProgressRow(
        number=number,
        ranks=tuple(sorted(bars)),
        title=_common([bar.title for bar in bars.values()]),
        slowest=_fraction(bars[slow]),
        fastest=_fraction(bars[fast]),
        counts=_counts(bars[slow], bars[fast]),
        mark=mark,
        stats=_ended_stats(bars) if "open" not in states.values() else _stats(bars[slow], "open"),
        note=_notes([bar.note for _, bar in sorted(bars.items())]),
        state=_overall(states),
        num_outer=min(bar.num_outer for bar in bars.values()),
        marked=marked,
        members=tuple(
            Member(
                rank, _fraction(bar), _member_text(bar, states[rank], died.get(rank)), states[rank]
            )
            for rank, bar in sorted(bars.items())
        ),
    )


def _state_of(bar: Bar, has_died: bool) -> RowState:
    if bar.state == "open":
        return "failed" if has_died else "open"
    if bar.state in ("failed", "stopped"):
        return bar.state
    return "done" if not bar.total or bar.done >= bar.total or bar.state == "removed" else "short"


def _overall(states: Mapping[int, RowState]) -> RowState:
    """Return the state of a row: the worst state of its ranks, or open while a rank goes on."""
    order: tuple[RowState, ...] = ("failed", "stopped", "open", "short", "done")
    return next(state for state in order if state in states.values())


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
) -> tuple[str, tuple[int, ...]]:
    """Return the ranks that stand out (slow, failed, ended early), and a text that describes
    them.
    """
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
        return ", ".join(said), (*lost, *failed, *stopped)
    if states[slow] != "open" or not _is_behind(bars[slow], bars[fast]):
        return "", ()
    last = tuple(sorted(rank for rank in bars if _place(bars[rank]) == _place(bars[slow])))
    return f"{describe_ranks(last)} slowest", last


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
    time = _stats(msgspec.structs.replace(longest, rate=0.0), "done")
    if fast.rate < _SLOWER * slow.rate:
        return f"{_rate(slow)}, {time}"
    number, _, unit = _rate(slow).partition(" ")
    is_one_unit = _rate(fast).endswith(f" {unit}")
    return f"{number if is_one_unit else _rate(slow)} … {_rate(fast)}, {time}, rank {low} slowest"


def _rate(bar: Bar) -> str:
    return format_rate(bar.rate, bar.unit, bar.divisor)


def _member_text(bar: Bar, state: RowState, death: str | None) -> str:
    fraction = _fraction(bar)
    percent = "" if fraction is None else f"{math.floor(100 * fraction)} %  "
    ending = {"failed": death or "failed", "stopped": "stopped", "short": "ended early"}.get(
        state, ""
    )
    parts = [f"{percent}{_counts(bar, bar)}", _stats(bar, state), bar.note, ending]
    return "  ".join(part for part in parts if part)


def _common(titles: list[str]) -> str:
    """Return the part that the titles of all ranks share, as each rank may write its own number
    into its title.
    """
    first = titles[0]
    if all(title == first for title in titles):
        return first
    start = 0
    while all(title[start : start + 1] == first[start : start + 1] != "" for title in titles):
        start += 1
    end = 0
    shortest = min(map(len, titles))
    while end < shortest - start and all(title[-1 - end] == first[-1 - end] for title in titles):
        end += 1
    return f"{first[:start]}…{first[len(first) - end :]}"


def _notes(notes: list[str]) -> str:
    """Merge the texts that ranks show beside a bar; a number that differs becomes a range."""
    if all(note == notes[0] for note in notes):
        return notes[0]
    pairs = [[part.partition("=") for part in note.split(", ")] for note in notes]
    names = [name for name, _, _ in pairs[0]]
    if any([name for name, _, _ in row] != names for row in pairs):
        return ""
    parts = []
    for column, name in enumerate(names):
        values = [row[column][2] for row in pairs]
        if all(value == values[0] for value in values):
            parts.append("".join(pairs[0][column]))
            continue
        try:
            ordered = sorted(values, key=float)
        except ValueError:
            parts.append(f"{name}=…")
            continue
        parts.append(f"{name}={ordered[0]}…{ordered[-1]}")
    return ", ".join(parts)


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


def label_of(row: ProgressRow) -> str:
    """Return the ranks of a row as a label: ``[0-3]``."""
    return f"[{count_ranks(row.ranks)}]"
