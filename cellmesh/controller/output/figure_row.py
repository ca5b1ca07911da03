"""Shows figures that differ by rank side by side, in one display that is redrawn as they arrive."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .fold import Ranks
from .mime_bundle import PICTURES, html_label, label, labelled, picture

# A row is sent again with each figure that it gets: after so many the next figure begins another.
_MAX_FIGURES, _MAX_BYTES = 8, 2_000_000
_ROW = '<div style="display:flex;flex-wrap:wrap;gap:4px 12px;align-items:flex-start">'
_FITTING = "max-width:100%;height:auto"
_CELL = '<div style="flex:1 1 240px;max-width:max-content">'


@dataclass
class FigureRow:
    """The figures of one row: at most one of each rank.

    Attributes:
        display_id: of the row's display.
        figures: the ranks and the bundle of each figure, in the order of arrival.
    """

    display_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    figures: list[tuple[Ranks, Mapping[str, Any]]] = field(default_factory=list)

    def has_room(self, ranks: Ranks, content: Mapping[str, Any]) -> bool:
        """Whether a figure of these ranks can be added to this row."""
        size = sum(_size(each) for _, each in self.figures) + _size(content)
        return (
            len(self.figures) < _MAX_FIGURES
            and size <= _MAX_BYTES
            and all(set(ranks).isdisjoint(others) for others, _ in self.figures)
        )

    def add(self, ranks: Ranks, content: Mapping[str, Any]) -> dict[str, Any]:
        """Add a figure; return the content of the row's display."""
        self.figures.append((ranks, content))
        bundle = labelled(dict(content), ranks) if len(self.figures) == 1 else self._side_by_side()
        return {**bundle, "transient": {"display_id": self.display_id}}

    def _side_by_side(self) -> dict[str, Any]:
        shown = sorted(self.figures, key=lambda figure: figure[0])
        cells = [
            f"{_CELL}{html_label(ranks)}{picture(content, _kind(content), _FITTING)}</div>"
            for ranks, content in shown
        ]
        plain = [(label(ranks), content["data"].get("text/plain", "")) for ranks, content in shown]
        texts = [f"{mark} {text}".rstrip() for mark, text in plain]
        data = {"text/plain": "\n".join(texts), "text/html": f"{_ROW}{''.join(cells)}</div>"}
        return {"data": data, "metadata": {}}


def is_figure(content: Mapping[str, Any]) -> bool:
    """Whether a MIME bundle is one picture, with nothing but text beside it."""
    kinds = set(content["data"]) - {"text/plain"}
    return (
        len(kinds) == 1 and kinds <= set(PICTURES) and isinstance(content["data"][kinds.pop()], str)
    )


def _kind(content: Mapping[str, Any]) -> str:
    return next(kind for kind in PICTURES if kind in content["data"])


def _size(content: Mapping[str, Any]) -> int:
    return len(content["data"][_kind(content)])
