"""The progress bars of one run: which ranks' bars are shown as one, where bars stand, when they are
drawn.

Pure: the ranks' words and the time go in, what to draw comes out. The first bars of ranks that have
the same title (numbers in it aside) are one bar, and so are the second ones. Bars stand together in
blocks: one that begins right after another, or inside of it, stands below it; one that begins after
other output has a block of its own. A block is redrawn in its place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...wire.user_code import Bar
from .bar_drawing import Bars, make_row

REDRAW_S = 0.1
# Once no bar of a block goes on, ranks that have not begun theirs are waited for, before it counts
# as ended.
SETTLE_S = 0.3
_MAX_ROWS = 10
_MAX_BLOCKS = 50


@dataclass(frozen=True)
class Mark:
    """The place of a progress bar in the queued output of a rank: the bar is drawn there once the
    output before it is shown.
    """

    group: int


@dataclass
class _Group:
    number: int
    key: tuple[object, ...]
    num_outer: int
    bars: dict[int, Bar] = field(default_factory=dict)
    block: int = -1


@dataclass
class _Block:
    groups: list[_Group] = field(default_factory=list)
    num_passed: int = 0
    is_changed: bool = True
    is_closed: bool = False
    # When none of its bars went on any more, and ranks may still begin theirs.
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
        self._died: dict[int, str] = {}
        self._is_buried = False
        self._numbers = itertools.count(1)
        self._drawn_at = float("-inf")
        self._changed = False

    # ---- what happens

    def take(self, rank: int, bar: Bar) -> Mark | None:
        """Note a rank's progress report; return the bar's `Mark` if the bar has no place in the
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
            return None  # said before it ended, and overtaken
        group.bars[rank] = bar
        self._touch(group)
        return mark

    def place(self, mark: Mark) -> bool:
        """Place a bar below the output before it, unless it has a place already; return whether it
        was placed.
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
        """Note that other output was shown below all blocks of bars, so that new bars need a new
        block.
        """
        self._is_buried = True

    def lose(self, ranks: Iterable[int], reason: str) -> None:
        """Note that these ranks have died, so that their bars will not move any more."""
        for rank in ranks:
            self._died[rank] = reason
            for group in self._groups.values():
                if rank in group.bars:
                    self._touch(group)

    # ---- what is shown

    def draw(self, now: float, at_once: bool = False, is_over: bool = False) -> list[Bars]:
        """Return the blocks that are drawn now: `at_once` all that have changed, and every block,
        as it will stay, if the run `is_over`.
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
                drawings.append(replace(drawing, closed=block.is_closed))
                if is_over:
                    block.ended_at = None
        return drawings

    def deadline(self) -> float | None:
        """Return when `draw` returns a block without new messages; None if no bar has changed."""
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
        return any(
            bar.state == "open" and rank not in self._died for rank, bar in group.bars.items()
        )

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
            tuple(make_row(group.number, group.bars, self._died) for group in shown),
            block.num_passed,
            len(block.groups) - len(shown),
            self._has_ended(block, now),
        )

    def _has_ended(self, block: _Block, now: float) -> bool:
        """Return whether all bars of a block have ended and no rank is expected to add one."""
        if any(self._is_open(group) for group in block.groups):
            block.ended_at = None
            return False
        gone = self._died.keys()
        if not all(self._ranks <= group.bars.keys() | gone for group in block.groups):
            block.ended_at = now if block.ended_at is None else block.ended_at
            if now < block.ended_at + SETTLE_S:
                return False
        block.ended_at = None
        return True

    def _is_removed(self, group: _Group) -> bool:
        """Return whether every rank has removed its bar of a group."""
        return all(bar.state == "removed" for bar in group.bars.values())

    def _forget(self, block: _Block, group: _Group) -> None:
        block.groups.remove(group)
        del self._groups[group.number]
        for rank, bar in group.bars.items():
            self._members.pop((bar.run, rank, bar.bar), None)
        self._by_key.pop(group.key, None)
