"""The progress bars of one run: joins the bars of ranks, places them in the output, and draws them
as text and as HTML. Pure.

Ranks' first bars with the same title (apart from numbers) are shown as one bar, and likewise their
second bars, and so on. Bars are shown in blocks: a bar that begins right after another, or inside
of it, is added below it; a bar that begins after other output starts a new block. A block is
redrawn in its place.

The HTML has no scripts, and only inline styles that viewers keep in untrusted notebooks. Colours
are legible on light and dark backgrounds.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from ...wire.ranks import count_ranks, describe_ranks
from ...wire.verbs import Bar
from .number_folding import join_lines, replace_numbers

REDRAW_S = 0.1
# Once no bar of a block is running, time to wait for ranks that have not begun theirs, before the
# block counts as ended.
SETTLE_S = 0.3
_MAX_ROWS = 10
_MAX_BLOCKS = 50


class Mark(msgspec.Struct, frozen=True):
    """The place of a progress bar in the queued output of a rank: the bar is drawn there once the
    output before it is shown.
    """

    group: int


class _Group(msgspec.Struct):
    number: int
    key: tuple[object, ...]
    num_outer: int
    bars: dict[int, Bar] = msgspec.field(default_factory=dict)
    block: int = -1


class _Block(msgspec.Struct):
    groups: list[_Group] = msgspec.field(default_factory=list)
    num_passed: int = 0
    is_changed: bool = True
    is_closed: bool = False
    # Time since which none of its bars is running, while ranks may still begin theirs.
    ended_at: float | None = None


class BarBoard:
    """The progress bars of one run, on all of its ranks."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._ranks = set(ranks)
        self._groups: dict[int, _Group] = {}
        self._by_key: dict[tuple[object, ...], _Group] = {}
        self._num_seen: dict[tuple[object, ...], int] = {}  # bars of a rank with this key
        self._members: dict[tuple[int, int, int], _Group] = {}  # (run, rank, bar)
        self._blocks: list[_Block] = []
        self._is_buried = False
        self._numbers = itertools.count(1)
        self._drawn_at = float("-inf")
        self._changed = False

    # ---- events

    def take(self, rank: int, bar: Bar) -> Mark | None:
        """Add a rank's progress report; return the bar's `Mark` if the bar has no place in the
        output yet.
        """
        mark = None
        member = (bar.run, rank, bar.bar)
        group = self._members.get(member)
        if group is None:
            if bar.state == "removed":
                return None
            group = self._members[member] = self._join(rank, bar)
            if group.block < 0:
                mark = Mark(group.number)
        elif group.bars[rank].state != "open" and bar.state == "open":
            return None  # an older report that arrived after the bar's last
        group.bars[rank] = bar
        self._touch(group)
        return mark

    def place(self, mark: Mark) -> bool:
        """Place a bar below the output so far, unless it has a place already; return whether it was
        placed.
        """
        group = self._groups.get(mark.group)
        if group is None or group.block >= 0:
            return False
        group.block = self._block_for(group)
        self._blocks[group.block].groups.append(group)
        self._is_buried = self._is_buried and group.block < len(self._blocks) - 1
        self._touch(group)
        return True

    def bury(self) -> None:
        """Record that other output was shown below all blocks of bars, so that new bars need a new
        block.
        """
        self._is_buried = True

    def lose(self, ranks: Iterable[int]) -> None:
        """Record that these ranks have died, which has ended their progress bars."""
        for group in self._groups.values():
            for rank in group.bars.keys() & set(ranks):
                group.bars[rank] = msgspec.structs.replace(group.bars[rank], state="done")
                self._touch(group)

    # ---- drawing

    def draw(self, now: float, at_once: bool = False, is_over: bool = False) -> list[Bars]:
        """Draw the blocks of progress bars that have changed, if their next drawing is due; return
        the drawings.

        Args:
            now: current time, in seconds.
            at_once: whether to draw all changed blocks even if the last drawing was a moment ago.
            is_over: whether the run has ended, so that each block is drawn in its final state.
        """
        due = self.deadline()
        if not is_over and (due is None or (now < due and not at_once)):
            return []
        self._drawn_at, self._changed = now, False
        drawings = []
        for number, block in enumerate(self._blocks):
            has_settled = block.ended_at is not None and now >= block.ended_at + SETTLE_S
            if block.is_changed or has_settled or (is_over and not block.is_closed):
                drawing = self._draw_block(number, block, now)
                block.is_changed, block.is_closed = False, drawing.closed or is_over
                drawings.append(msgspec.structs.replace(drawing, closed=block.is_closed))
                if is_over:
                    block.ended_at = None
        return drawings

    def deadline(self) -> float | None:
        """Return the time from which `draw` returns a block without new messages; None if no bar
        has changed.
        """
        if self._changed:
            return self._drawn_at + REDRAW_S
        ends = [block.ended_at + SETTLE_S for block in self._blocks if block.ended_at is not None]
        return min(ends, default=None)

    # ---- inside

    def _join(self, rank: int, bar: Bar) -> _Group:
        key = (bar.run, bar.num_outer, re.sub(r"\d+", "#", bar.title))
        place = self._num_seen[(rank, *key)] = self._num_seen.get((rank, *key), 0) + 1
        group = self._by_key.get((place, *key))
        if group is None:
            group = _Group(next(self._numbers), (place, *key), bar.num_outer)
            self._groups[group.number] = self._by_key[group.key] = group
        return group

    def _touch(self, group: _Group) -> None:
        if group.block >= 0:
            self._blocks[group.block].is_changed = self._changed = True

    def _block_for(self, group: _Group) -> int:
        last = len(self._blocks) - 1
        is_below_other = self._is_buried and last >= 0 and bool(self._blocks[last].groups)
        if last >= 0 and not (is_below_other and last + 1 < _MAX_BLOCKS):
            return last
        for other in reversed(self._groups.values()):
            if other.block >= 0 and other.num_outer < group.num_outer and self._is_open(other):
                return other.block
        self._blocks.append(_Block())
        return last + 1

    def _is_open(self, group: _Group) -> bool:
        return any(bar.state == "open" for bar in group.bars.values())

    def _draw_block(self, number: int, block: _Block, now: float) -> Bars:
        for group in [group for group in block.groups if self._is_removed(group)]:
            self._forget(block, group)
        ended = [group for group in block.groups if not self._is_open(group)]
        for group in ended[: max(0, len(block.groups) - _MAX_ROWS)]:
            self._forget(block, group)
            block.num_passed += 1
        shown = block.groups[:_MAX_ROWS]
        return Bars(
            number,
            tuple(make_row(group.number, group.bars) for group in shown),
            block.num_passed + len(block.groups) - len(shown),
            self._has_ended(block, now),
        )

    def _has_ended(self, block: _Block, now: float) -> bool:
        """Return whether all bars of a block have ended and no rank is expected to add one."""
        if any(self._is_open(group) for group in block.groups):
            block.ended_at = None
            return False
        if not all(self._ranks <= group.bars.keys() for group in block.groups):
            block.ended_at = now if block.ended_at is None else block.ended_at
            if now < block.ended_at + SETTLE_S:
                return False
        block.ended_at = None
        return True

    def _is_removed(self, group: _Group) -> bool:
        return all(bar.state == "removed" for bar in group.bars.values())

    def _forget(self, block: _Block, group: _Group) -> None:
        block.groups.remove(group)
        del self._groups[group.number]
        for rank, bar in group.bars.items():
            self._members.pop((bar.run, rank, bar.bar), None)
        self._by_key.pop(group.key, None)


# ---------------------------------------------------------------- one row for all ranks

# A row has the first of these states that a rank has. "short": it ended before its total.
RowState = Literal["open", "short", "done"]

# The slowest rank is named if it is behind by this much: in steps and as a fraction of the total,
# or in seconds.
_GAP_STEPS = 2
_GAP_FRACTION = 0.01
_GAP_S = 1.0
# Once bars have ended, the slowest rank is named if the fastest was faster by this factor.
_SLOWER = 1.1
# Shorter times are given in tenths of a second.
_BRIEF_S = 10.0


class ProgressRow(msgspec.Struct, frozen=True):
    """A progress bar as shown, joined from the bars of several ranks.

    Attributes:
        number: number of the bar in its run.
        ranks: ranks that have the bar.
        title: text before the bar.
        slowest, fastest: progress of the slowest and the fastest rank, 0 to 1; None if the total is
            unknown.
        counts: steps done, from the slowest to the fastest rank, and total: ``42-57/100``.
        mark: text on slow ranks; "" without any.
        stats: rate, and the time left or taken.
        note: text after the bar.
        state: see `RowState`.
        num_outer: number of bars that it is nested in.
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


class Bars(msgspec.Struct, frozen=True):
    """A drawing of one block of progress bars of a cell.

    Attributes:
        number: number of the block; a drawing replaces earlier ones of the same number.
        rows: its bars.
        num_hidden: number of bars left out for lack of room: the earliest or the last ones.
        closed: whether none of its bars is running.
    """

    number: int
    rows: tuple[ProgressRow, ...]
    num_hidden: int = 0
    closed: bool = False


def make_row(number: int, bars: Mapping[int, Bar]) -> ProgressRow:
    """Join the bars of several ranks into one row."""
    states = {_state_of(bar) for bar in bars.values()}
    going = {rank: bar for rank, bar in bars.items() if bar.state == "open"} or dict(bars)
    slow = min(going, key=lambda rank: _place(going[rank]))
    fast = max(bars, key=lambda rank: _place(bars[rank]))
    return ProgressRow(
        number=number,
        ranks=tuple(sorted(bars)),
        title=_joined({rank: bar.title for rank, bar in bars.items()}),
        slowest=_fraction(bars[slow]),
        fastest=_fraction(bars[fast]),
        counts=_counts(bars[slow], bars[fast]),
        mark=_mark(bars, slow, fast),
        stats=_stats(bars, bars[slow], "open" in states),
        note=_joined({rank: bar.note for rank, bar in bars.items()}),
        state=next(state for state in get_args(RowState) if state in states),
        num_outer=min(bar.num_outer for bar in bars.values()),
    )


def _state_of(bar: Bar) -> RowState:
    if bar.state == "open":
        return "open"
    return "done" if not bar.total or bar.done >= bar.total or bar.state == "removed" else "short"


def _place(bar: Bar) -> float:
    return bar.done / bar.total if bar.total else bar.done


def _fraction(bar: Bar) -> float | None:
    return min(1.0, max(0.0, bar.done / bar.total)) if bar.total > 0 else None


def _mark(bars: Mapping[int, Bar], slow: int, fast: int) -> str:
    """Return a remark that names the slowest ranks of a progress bar; "" if they are not clearly
    behind the fastest.
    """
    if bars[slow].state != "open" or not _is_behind(bars[slow], bars[fast]):
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


def _stats(bars: Mapping[int, Bar], slow: Bar, is_open: bool) -> str:
    """Return the slowest rank's rate and the time left; once the bars have ended, the lowest and
    the highest rate, the longest time, and the slowest rank.
    """
    if is_open:
        rates, end = _rate(slow), ""
        is_known = slow.total > 0 and slow.rate > 0
        left_s = (slow.total - slow.done) / slow.rate if is_known else slow.elapsed_s
        time = f"{format_time(left_s)} left" if is_known else format_time(left_s)
    else:
        took_s = max(bar.elapsed_s for bar in bars.values())
        time = f"in {took_s:.1f} s" if took_s < _BRIEF_S else f"in {format_time(took_s)}"
        rated = {rank: bar.rate for rank, bar in sorted(bars.items()) if bar.rate > 0}
        low, high = (f(rated, key=rated.__getitem__, default=-1) for f in (min, max))
        rates, end = (_rate(bars[low]) if rated else ""), ""
        if rated and rated[high] >= _SLOWER * rated[low]:
            rates, end = f"{rates} … {_rate(bars[high])}", f"rank {low} slowest"
    return ", ".join(filter(None, (rates, time, end)))


def _rate(bar: Bar) -> str:
    return format_rate(bar.rate, bar.unit, bar.divisor)


def _joined(texts: Mapping[int, str]) -> str:
    """Join ranks' texts into one, with the range of each number that differs."""
    lines = sorted(texts.items())
    if len({replace_numbers(text) for text in texts.values()}) == 1:
        return join_lines(lines)
    return f"{lines[0][1]}…"


def format_count(number: float, divisor: int = 0) -> str:
    """Format a number of steps or, given a divisor, of bytes with a unit prefix."""
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
}
_BEHIND = "#d08700"
_GROUND = "rgba(128,128,128,0.25)"
_SOFT = "opacity:0.65"


def as_lines(bars: Bars) -> list[str]:
    """Return a block of progress bars as text, a line for each bar."""
    width = max((len(_head(row)) for row in bars.rows), default=0)
    return [*_hidden(bars), *(_line(row, width) for row in bars.rows)]


def as_html(bars: Bars) -> str:
    """Return a block of progress bars as HTML."""
    width = max((len(_head(row)) for row in bars.rows), default=0)
    parts = [f'<div style="{_SOFT}">{text}</div>' for text in _hidden(bars)]
    parts += [_row_html(row, width) for row in bars.rows]
    style = "font-family:monospace;font-size:12px;line-height:18px;margin:2px 0"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _hidden(bars: Bars) -> list[str]:
    return [f"… {bars.num_hidden:,} more"] if bars.num_hidden else []


# ---- text


def _head(row: ProgressRow) -> str:
    """Return a bar's label and title, indented below the bar that it is nested in."""
    return f"[{count_ranks(row.ranks)}] {'  ' * row.num_outer}{row.title}".rstrip()


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
    pieces = [_span(_head(row), f"min-width:{width * 0.62:.1f}em")]
    if row.slowest is not None and row.fastest is not None:
        pieces.append(_span(_percent(row.slowest), "min-width:3.1em;text-align:right"))
        pieces.append(_track(row.slowest, row.fastest, _COLOURS[row.state]))
    pieces += [
        _span(row.counts),
        _span(row.mark, f"color:{_BEHIND};font-weight:bold"),
        _span(row.stats, _SOFT),
        _span(row.note),
    ]
    return f"<div>{''.join(pieces)}</div>"


def _span(text: str, style: str = "") -> str:
    kept = html.escape(text).replace("  ", "&nbsp; ")
    style = f"display:inline-block;margin-right:12px;{style}"
    return f'<span style="{style}">{kept}</span>' if text else ""


def _track(slowest: float, fastest: float, colour: str) -> str:
    """Return a bar as HTML, filled up to the slowest rank, and pale up to the fastest."""
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
