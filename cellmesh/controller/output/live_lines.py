"""Output that replaces itself: unfinished lines of many ranks that differ only in numbers become
one, and what is cleared or updated is shown ten times a second at most. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...wire.ranks import describe_ranks
from .fold import Block, Live, Ranks, Rich

# Fewer are shown as they are.
MIN_LINES = 3
# No part of a time (0:05).
_NUMBER = re.compile(r"(?<![\d.])(?<!\d:)-?\d+(?:\.\d+)?(?!\d|:\d|\.\d)")
_DRAWN = re.compile(r"[█▏▎▍▌▋▊▉▐░▒▓#=>\-━╸╺\s]+")

Line = tuple[Ranks, str]
FRAME_S = 0.1


def compact(lines: Sequence[Line]) -> list[Line]:
    """Join unfinished lines of ranks that differ only in numbers, if there are many.

    What stands for all is the line of the ranks that are behind, with how far its numbers reach. A
    rank may redraw several lines together.
    """
    rows = [(ranks, row) for ranks, text in lines for row in text.split("\n")]
    groups: dict[str, list[Line]] = {}
    for ranks, row in rows:
        groups.setdefault(_skeleton(row), []).append((ranks, row))
    joined: list[Line] = []
    for each in rows:
        group = groups[_skeleton(each[1])]
        if len(group) < MIN_LINES:
            joined.append(each)
        elif each == group[0]:
            joined.append(_join(group))
    return joined


def _skeleton(text: str) -> str:
    return _DRAWN.sub("", re.sub(r"\d+(?:\.\d+)?", "0", text))


def _join(group: Sequence[Line]) -> Line:
    found = [[match[0] for match in _NUMBER.finditer(text)] for _, text in group]
    ranks = tuple(sorted(rank for members, _ in group for rank in members))
    if not found[0] or any(len(numbers) != len(found[0]) for numbers in found):
        return ranks, min(group)[1]
    # Many begin with their rank, which does not tell how far they are.
    begins_with_rank = all(
        members == (float(numbers[0]),) for (members, _), numbers in zip(group, found, strict=True)
    )
    place = 1 if begins_with_rank and len(found[0]) > 1 else 0
    firsts = [float(numbers[place]) for numbers in found]
    last = firsts.index(min(firsts))
    columns = list(zip(*found, strict=True))
    spans = iter([_span(column) for column in columns])
    text = _NUMBER.sub(lambda match: next(spans), group[last][1])
    if min(firsts) == max(firsts):
        return ranks, text
    slow = [
        members for (members, _), first in zip(group, firsts, strict=True) if first == min(firsts)
    ]
    behind = sorted(rank for members in slow for rank in members)
    return ranks, f"{text}  [{describe_ranks(behind)} slowest]"


def _span(column: Sequence[str]) -> str:
    ordered = sorted(set(column), key=float)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}…{ordered[-1]}"


class Frames:
    """Holds back displays that others are about to replace; used in the link's loop."""

    def __init__(self) -> None:
        self._held: list[Block | Live] = []
        self._shown_at = float("-inf")

    def pass_on(
        self, blocks: Sequence[Block | Live], now: float, everything: bool
    ) -> list[Block | Live]:
        """Return the blocks of output to show now, of these and of those that were held back."""
        if not self._held and not any(map(_is_change, blocks)):
            return list(blocks)
        self._held = _without_replaced([*self._held, *blocks])
        if not everything and now < self._shown_at + FRAME_S:
            return []
        held, self._held = self._held, []
        self._shown_at = now
        return held

    def deadline(self) -> float | None:
        """Return when a block that is held back is to be shown; None if there is none."""
        return self._shown_at + FRAME_S if self._held else None


def _is_change(block: Block | Live) -> bool:
    return (
        isinstance(block, Block)
        and isinstance(block.item, Rich)
        and block.item.kind in ("clear", "update")
    )


def _without_replaced(blocks: Sequence[Block | Live]) -> list[Block | Live]:
    """Return blocks of output without those that a later block clears or updates."""
    kept: list[Block | Live] = []
    cleared: set[int] = set()
    updated: set[tuple[int, str]] = set()
    for block in reversed(blocks):
        if isinstance(block, Live):
            lines = tuple(
                (left, text)
                for ranks, text in block.lines
                if (left := tuple(rank for rank in ranks if rank not in cleared))
            )
            kept += [replace(block, lines=lines)] if lines or not block.lines else []
            continue
        kind = block.item.kind if isinstance(block.item, Rich) else ""
        ids = block.display_ids or ("",) * len(block.ranks)
        # An update may be of an earlier cell's display: clearing this cell does not replace it.
        pairs = [
            (rank, each)
            for rank, each in zip(block.ranks, ids, strict=True)
            if ((rank, each) not in updated if kind == "update" else rank not in cleared)
        ]
        if kind == "update":
            updated.update(pairs)
        elif kind == "clear":
            cleared.update(block.ranks)
        if pairs:
            ranks, left_ids = zip(*pairs, strict=True)
            kept.append(
                replace(block, ranks=ranks, display_ids=left_ids if block.display_ids else ())
            )
    return kept[::-1]
