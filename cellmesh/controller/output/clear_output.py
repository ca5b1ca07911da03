"""A display of their own for ranks that call `clear_output` after other ranks have shown too much
to draw again. Pure.

A front end can only clear a whole cell. Beside little, others' output is shown again each time;
beside much, what these ranks show from then on stands in one display that is updated: the newest of
it, in which nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .console import as_text, is_textual
from .fold import AlikeLines, Block, Gap, Line, Live, Rich
from .mime_bundle import html_label, still
from .rank_tabs import join
from .terminal import as_html

MAX_BLOCKS = 50
MAX_BYTES = 200_000


class Pane:
    """A display in a cell with the newest output of those ranks that have cleared their output."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.is_changed = False
        self._blocks: list[Block] = []
        self._dropped: set[int] = set()  # ranks with older output that is not here

    def clear(self, ranks: Iterable[int]) -> None:
        """Empty the display for these ranks, which show their output in it from now on."""
        gone = set(ranks)
        self.ranks |= gone
        left = [
            (block, tuple(rank for rank in block.ranks if rank not in gone))
            for block in self._blocks
        ]
        self._blocks = [
            replace(block, ranks=ranks, display_ids=()) for block, ranks in left if ranks
        ]
        self._dropped -= gone
        self.is_changed = True

    def take(self, block: Block | Live) -> bool:
        """Add a block of output; return False if the block, and what its ranks show next, belongs
        elsewhere.
        """
        if isinstance(block, Live) or not self.ranks.intersection(block.ranks):
            return False
        item = block.item
        if not isinstance(item, Line | AlikeLines | Gap | Rich) or (
            isinstance(item, Rich) and item.kind in ("clear", "update")
        ):
            return False
        if any(block.display_ids) or not self.ranks.issuperset(block.ranks):
            self.ranks.difference_update(block.ranks)
            return False
        self._blocks.append(block)
        sizes = [_size(each) for each in self._blocks]
        while len(self._blocks) > MAX_BLOCKS or (len(sizes) > 1 and sum(sizes) > MAX_BYTES):
            self._dropped.update(self._blocks[0].ranks)
            del self._blocks[0], sizes[0]
        self.is_changed = True
        return True

    def content(self) -> dict[str, Any]:
        """Return the MIME bundle of the display."""
        self.is_changed = False
        above = "… the text above it is in %dist_logs\n" if self._dropped else ""
        text = above + "".join(as_text(block)[1] for block in self._blocks)
        shown = join(
            [("stdout", above.rstrip("\n"))] * bool(above)
            + [_piece(block) for block in self._blocks]
        )
        return {
            "data": {
                "text/plain": text.rstrip("\n"),
                "text/html": f'<div style="font-size:13px">{shown}</div>',
            },
            "metadata": {},
        }


def _piece(block: Block) -> tuple[str, str]:
    if is_textual(block):
        stream, text = as_text(block)
        return stream, as_html(text.rstrip("\n"))
    assert isinstance(block.item, Rich)
    return "html", f"{html_label(block.ranks)}<div>{still(block.item.content())}</div>"


def _size(block: Block) -> int:
    item = block.item
    return len(item.bundle) if isinstance(item, Rich) else len(getattr(item, "text", ""))
