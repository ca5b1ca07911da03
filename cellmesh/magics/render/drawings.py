"""Small pictures for viewers without widgets: histograms and shards as SVG, tensors as PNG.

Each is an ``<img>`` with its data in it: notebooks that are not trusted keep those, and neither
``<svg>`` nor ``<style>``. Colours are such as show on white and on black: an image does not know
the page's theme.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...wire.inspect import Pixels, TensorSummary
from ...wire.ranks import describe_ranks, format_ranks, group_ranks
from .palette import colour_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BAR = "#4b8ed6"
_LINE = "#808080"
_LEVELS = " ▁▂▃▄▅▆▇█"
# cividis, and blue to red; NaN and infinities are of neither.
_ONE_SIGN = "00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 e1cc55 fee838"
_BOTH_SIGNS = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
_NAN, _INFINITE, _MINUS_INFINITE = (255, 0, 220), (0, 224, 64), (0, 120, 40)
# A picture stays in the notebook's file.
_MAX_SIDE = 160
_SHOWN_SIDE = 320
_MAX_BLOCKS = 4096


def image(data: bytes, kind: str, alt: str, width: int, height: int) -> str:
    """An ``<img>`` with its data in it.

    Args:
        data: the picture.
        kind: its MIME type.
        alt: what it shows, in words.
        width, height: how large it is shown.
    """
    words = html.escape(alt, quote=True)
    return (
        f'<img src="data:{kind};base64,{base64.b64encode(data).decode()}" alt="{words}" '
        f'title="{words}" width="{width}" height="{height}" '
        'style="max-width:100%;image-rendering:pixelated;display:block">'
    )


# ---- histograms


def bars_text(counts: Sequence[int], width: int = 24) -> str:
    """A histogram in one line of text; a bin that has any element shows."""
    most = max(counts, default=0)
    if not most:
        return ""
    per = -(-len(counts) // width)
    joined = [sum(counts[at : at + per]) for at in range(0, len(counts), per)]
    most = max(joined)
    return "".join(_LEVELS[math.ceil(count / most * (len(_LEVELS) - 1))] for count in joined)


def bars_image(counts: Sequence[int], low: float, high: float) -> str:
    """A histogram as an image."""
    width, height, most = 144, 28, max([*counts, 1])
    step = width / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{at * step:.2f}" y="{height - tall:.2f}" width="{step * 0.9:.2f}" '
        f'height="{tall:.2f}"/>'
        for at, tall in enumerate(
            max(1.0, count / most * height) if count else 0.0 for count in counts
        )
        if tall
    )
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 1}">'
        f'<g fill="{_BAR}">{bars}</g>'
        f'<path d="M0 {height + 0.5}H{width}" stroke="{_LINE}" stroke-width="1"/></svg>'
    )
    words = f"{sum(counts):,} elements from {low:.4g} to {high:.4g}"
    return image(drawing.encode(), "image/svg+xml", words, width, height + 1)


# ---- shards


@dataclass(frozen=True)
class Block:
    """A part of a DTensor, and the ranks that hold it.

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


def blocks_of(facts: Mapping[int, TensorSummary]) -> list[Block]:
    """The parts of one DTensor, on the ranks that are in its mesh; [] of a tensor that is none."""
    places = {
        rank: (fact.offset, fact.local_shape)
        for rank, fact in sorted(facts.items())
        if fact.placements
        and fact.local_shape is not None
        and len(fact.offset) == len(fact.local_shape)
    }
    return [Block(ranks, *place) for place, ranks in group_ranks(places).items()]


def shards_image(shape: Sequence[int], blocks: Sequence[Block]) -> str:
    """A DTensor drawn whole, each part in its place, in two of its dims; "" if there is nothing to
    draw.
    """
    drawn = [block for block in blocks if block.shape and all(block.shape)][:_MAX_BLOCKS]
    if not drawn or not all(shape):
        return ""
    row_dim, col_dim = _dims_to_draw(shape, drawn)
    num_rows = 1 if row_dim is None else shape[row_dim]
    num_cols = shape[col_dim]
    width = 360
    height = round(min(max(width * num_rows / num_cols, 36), 240))
    num_ranks = 1 + max(rank for block in blocks for rank in block.ranks)
    parts = []
    for block in drawn:
        top, rows = (0, 1) if row_dim is None else (block.offset[row_dim], block.shape[row_dim])
        x, wide = block.offset[col_dim] / num_cols * width, block.shape[col_dim] / num_cols * width
        y, tall = top / num_rows * height, rows / num_rows * height
        colour, text = colour_of(block.ranks[0], num_ranks), format_ranks(block.ranks)
        parts.append(
            f'<rect x="{x + 1:.2f}" y="{y + 1:.2f}" width="{wide:.2f}" height="{tall:.2f}" '
            f'fill="{colour}" fill-opacity="0.3" stroke="{colour}" stroke-width="1.5"/>'
        )
        if wide > 7 * len(text) + 4 and tall > 13:
            parts.append(
                f'<text x="{x + 1 + wide / 2:.2f}" y="{y + 5 + tall / 2:.2f}" fill="#fff" '
                'stroke="#444" stroke-width="3" paint-order="stroke" '
                f'text-anchor="middle">{text}</text>'
            )
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2} {height + 2}" '
        f'font-family="sans-serif" font-size="12" font-weight="bold">{"".join(parts)}</svg>'
    )
    words = "; ".join(map(str, blocks[:64]))
    return image(drawing.encode(), "image/svg+xml", words, width + 2, height + 2)


def _dims_to_draw(shape: Sequence[int], blocks: Sequence[Block]) -> tuple[int | None, int]:
    """The dims that are cut, before those that are not; rows and columns."""
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
    """Pixels in colours; "" if there are none."""
    values = pixels.values
    if not values.size:
        return ""
    height, width = values.shape
    values = values[:: -(-height // _MAX_SIDE), :: -(-width // _MAX_SIDE)]
    scale = _SHOWN_SIDE / max(values.shape)
    shown = [max(1, round(side * scale)) for side in values.shape]
    words = f"from {pixels.low:.4g} to {pixels.high:.4g}"
    return image(
        png(_colours(values, pixels.low, pixels.high)), "image/png", words, shown[1], shown[0]
    )


def _colours(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    """[height, width, 3]: around zero where there are numbers of both signs."""
    import numpy as np

    if low < 0 < high:
        high = max(-low, high)
        low = -high
        stops = _BOTH_SIGNS
    else:
        stops = _ONE_SIGN
    table = np.array(
        [[int(stop[at : at + 2], 16) for at in (0, 2, 4)] for stop in stops.split()], float
    )
    with np.errstate(all="ignore"):
        unit = np.clip((values.astype(float) - low) / ((high - low) or 1.0), 0, 1)
    at = np.nan_to_num(unit) * (len(table) - 1)
    known = np.arange(len(table))
    colours = np.stack([np.interp(at, known, table[:, part]) for part in range(3)], -1).round()
    colours[np.isnan(values)] = _NAN
    colours[values == np.inf] = _INFINITE
    colours[values == -np.inf] = _MINUS_INFINITE
    return colours.astype(np.uint8)


def png(colours: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of [height, width, 3] (red, green, blue)."""
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
