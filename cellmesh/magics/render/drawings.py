"""Small pictures for viewers without widgets: histograms and shards as SVG, tensors as PNG."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...wire.inspect import Pixels, TensorSummary
from ...wire.ranks import describe_ranks, format_ranks, group_ranks
from .svg import colour_of, drawing, element, heat_colours, image

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BAR = "#4b8ed6"
_LINE = "#808080"
_LEVELS = " ▁▂▃▄▅▆▇█"
# A picture stays in the notebook's file.
_MAX_SIDE = 64
_SHOWN_SIDE = 320
_MAX_BLOCKS, _MAX_NAMED_BLOCKS = 64, 32


# ---- histograms


def bars_text(counts: Sequence[int], width: int = 24) -> str:
    """Draw a histogram in one line of text; a bin with any element is visible."""
    most = max(counts, default=0)
    if not most:
        return ""
    per = -(-len(counts) // width)
    joined = [sum(counts[at : at + per]) for at in range(0, len(counts), per)]
    most = max(joined)
    return "".join(_LEVELS[math.ceil(count / most * (len(_LEVELS) - 1))] for count in joined)


def bars_image(counts: Sequence[int], low: float, high: float) -> str:
    """Return a histogram as an HTML image."""
    width, height, most = 144, 28, max([*counts, 1])
    step = width / max(len(counts), 1)
    path = ""
    for index, count in enumerate(counts):
        tall = max(1.0, count / most * height)  # a bin that has any element shows
        if count:
            path += f"M{index * step:.4g} {height}v-{tall:.3g}h{step * 0.9:.3g}v{tall:.3g}"
    bars = [element("path", d=path, fill=_BAR)] if path else []
    axis = element("path", d=f"M0 {height + 0.5}H{width}", stroke=_LINE)
    words = f"{sum(counts):,} elements from {low:.4g} to {high:.4g}"
    return image(drawing(width, height + 1, *bars, axis), words, width, height + 1)


# ---- shards


@dataclass(frozen=True)
class TextBlock:
    """A part of a DTensor, and the ranks that hold it, to be drawn.

    Attributes:
        ranks: they hold the same part.
        offset, shape: where it lies in the whole.
    """

    ranks: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        if not all(self.shape):
            return f"{describe_ranks(self.ranks)}: nothing"
        spans = (
            f"{begin}:{begin + size}" for begin, size in zip(self.offset, self.shape, strict=True)
        )
        return f"{describe_ranks(self.ranks)}: [{', '.join(spans)}]"


def blocks_of(facts: Mapping[int, TensorSummary]) -> list[TextBlock]:
    """Return the parts of one DTensor on the ranks of its mesh; [] for other tensors."""
    places = {
        rank: (fact.offset, fact.local_shape)
        for rank, fact in sorted(facts.items())
        if fact.placements
        and fact.local_shape is not None
        and len(fact.offset) == len(fact.local_shape)
    }
    return [TextBlock(ranks, *place) for place, ranks in group_ranks(places).items()]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a DTensor lie in two of its dims.

    Attributes:
        dims: the dims for rows and columns; None for the rows of a vector.
        size: of the whole in them.
        places: a block, and its top, left, height and width as shares of the whole. Blocks that
            differ in other dims only lie below each other in one place.
    """

    dims: tuple[int | None, int]
    size: tuple[int, int]
    places: Sequence[tuple[TextBlock, tuple[float, float, float, float]]]

    def height_of(self, width: float, least: float, most: float) -> int:
        """Return how high a drawing of this width is."""
        return round(min(max(width * self.size[0] / self.size[1], least), most))


def lay_out(shape: Sequence[int], blocks: Sequence[TextBlock]) -> Layout | None:
    """Lay out the parts of a DTensor, those with elements; None if there is nothing to draw."""
    drawn = [block for block in blocks if block.shape and all(block.shape)]
    if not drawn or not all(shape):
        return None
    row_dim, col_dim = _dims_to_draw(shape, drawn)
    num_rows, num_cols = 1 if row_dim is None else shape[row_dim], shape[col_dim]
    boxes: dict[tuple[int, ...], list[TextBlock]] = {}
    for block in drawn:
        rows = (0, 1) if row_dim is None else (block.offset[row_dim], block.shape[row_dim])
        box = (*rows, block.offset[col_dim], block.shape[col_dim])
        boxes.setdefault(box, []).append(block)
    places = []
    for (top, height, left, width), shared in boxes.items():
        tall = height / num_rows / len(shared)
        for layer, block in enumerate(shared):
            place = (top / num_rows + layer * tall, left / num_cols, tall, width / num_cols)
            places.append((block, place))
    return Layout((row_dim, col_dim), (num_rows, num_cols), places)


def shards_image(shape: Sequence[int], blocks: Sequence[TextBlock]) -> str:
    """Draw two dims of a whole DTensor with each rank's part in its place; "" if there is nothing
    to draw.
    """
    layout = lay_out(shape, blocks)
    if layout is None:
        return ""
    drawn = layout.places[:_MAX_BLOCKS]
    width, height = 360, layout.height_of(360, 36, 240)
    num_ranks = 1 + max(rank for block in blocks for rank in block.ranks)
    parts: list[str] = []
    names: list[str] = []
    for block, place in drawn:
        y, x, tall, wide = (a * b for a, b in zip(place, (height, width) * 2, strict=True))
        colour, text = colour_of(block.ranks[0], num_ranks), format_ranks(block.ranks)
        box = {"x": x + 1, "y": y + 1, "width": wide, "height": tall}
        parts.append(element("rect", **box, fill=colour, stroke=colour))
        if len(drawn) <= _MAX_NAMED_BLOCKS and wide > 7 * len(text) + 4 and tall > 13:
            names.append(element("text", text, x=x + 1 + wide / 2, y=y + 5 + tall / 2))
    halo = {"fill": "#fff", "stroke": "#444", "stroke_width": 3, "paint_order": "stroke"}
    parts = [
        element("g", *parts, fill_opacity=0.3, stroke_width=1.5),
        element("g", *names, text_anchor="middle", **halo),
    ]
    font = {"font_family": "sans-serif", "font_size": 12, "font_weight": "bold"}
    words = "; ".join(map(str, blocks[:64]))
    return image(drawing(width + 2, height + 2, *parts, **font), words, width + 2, height + 2)


def _dims_to_draw(shape: Sequence[int], blocks: Sequence[TextBlock]) -> tuple[int | None, int]:
    """Return the dims for rows and columns; sharded dims come first."""
    if len(shape) == 1:
        return None, 0
    cut = [
        dim for dim, size in enumerate(shape) if any(block.shape[dim] != size for block in blocks)
    ]
    whole = [dim for dim in range(len(shape)) if dim not in cut]
    row, col = sorted([*cut, *reversed(whole)][:2])
    return row, col


# ---- heatmaps


def heatmap_image(pixels: Pixels) -> str:
    """Draw a tensor's pixels in colours, as an HTML image; "" if there are none."""
    values = pixels.values
    if not values.size:
        return ""
    height, width = values.shape
    values = values[:: -(-height // _MAX_SIDE), :: -(-width // _MAX_SIDE)]
    scale = _SHOWN_SIDE / max(values.shape)
    shown = [max(1, round(side * scale)) for side in values.shape]
    words = f"from {pixels.low:.4g} to {pixels.high:.4g}"
    picture = png(heat_colours(values, pixels.low, pixels.high))
    return image(picture, words, shown[1], shown[0], "image/png")


def png(colours: npt.NDArray[np.uint8]) -> bytes:
    """Encode an array [height, width, 3] (red, green, blue) as PNG."""
    height, width, _ = colours.shape
    lines = b"".join(
        b"\0" + line.tobytes() for line in colours
    )  # each begins with its filter: none

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
