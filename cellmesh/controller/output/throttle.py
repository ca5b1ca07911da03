"""Limits animations: output that replaces itself is shown ten times a second.

Pure: blocks and the time go in, the blocks to show come out. A loop that clears its output, or
updates a display, may turn a thousand times a second; what it replaced before anybody saw it is not
shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .fold import Block, Live, Rich

FRAME_S = 0.1


class Frames:
    """Holds back displays that would be replaced at once; used in the link's loop."""

    def __init__(self) -> None:
        self._held: list[Block | Live] = []
        self._shown_at = float("-inf")

    def pass_on(
        self, blocks: Sequence[Block | Live], now: float, everything: bool
    ) -> list[Block | Live]:
        """Return the blocks to show now, of these and of those that were held back.

        Args:
            blocks: what has come.
            now: seconds.
            everything: hold nothing back.
        """
        if not self._held and not any(map(_is_change, blocks)):
            return list(blocks)
        self._held = _without_replaced([*self._held, *blocks])
        if not everything and now < self._shown_at + FRAME_S:
            return []
        held, self._held = self._held, []
        self._shown_at = now
        return held

    def deadline(self) -> float | None:
        """When a block that is held back is to be shown; None if there is none."""
        return self._shown_at + FRAME_S if self._held else None


def _is_change(block: Block | Live) -> bool:
    return (
        isinstance(block, Block)
        and isinstance(block.item, Rich)
        and block.item.kind in ("clear", "update")
    )


def _without_replaced(blocks: Sequence[Block | Live]) -> list[Block | Live]:
    """Return the blocks without those that a later block clears or updates."""
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
