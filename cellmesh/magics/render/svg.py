"""Writes SVG and ``<img>`` elements as text, and chooses colours."""

from __future__ import annotations

import base64
import colorsys
import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# Colours for up to eight ranks that colour-blind people can distinguish, from Paul Tol's "bright"
# scheme and from Okabe & Ito's.
_FEW = ("#4477aa", "#ee7733", "#228833", "#cc3377", "#009988", "#aa7700", "#8855bb", "#bb4444")
# Colour maps: cividis, and blue to red; NaN and infinities have other colours.
_ONE_SIGN = "00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 e1cc55 fee838"
_BOTH_SIGNS = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"
_NAN, _INFINITE, _MINUS_INFINITE = (255, 0, 220), (0, 224, 64), (0, 120, 40)


def colour_of(rank: int, num_ranks: int) -> str:
    """Return a rank's colour, as ``#rrggbb``."""
    if num_ranks <= len(_FEW):
        return _FEW[rank % len(_FEW)]
    red, green, blue = colorsys.hls_to_rgb(rank / num_ranks, 0.48, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def heat_colours(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Map numbers to colours, as [height, width, 3] of red, green, blue; zero has the middle colour
    if both signs occur.
    """
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


def element(tag: str, /, *children: str, **attributes: object) -> str:
    """Write an SVG element as text.

    Args:
        tag: name of the element.
        children: elements, or escaped text.
        attributes: name -> value; underscores in names become hyphens, and floats are rounded to
            two decimals.
    """
    words = "".join(
        f' {name.replace("_", "-")}="{_number(value)}"' for name, value in attributes.items()
    )
    return f"<{tag}{words}>{''.join(children)}</{tag}>" if children else f"<{tag}{words}/>"


def drawing(width: float, height: float, /, *children: str, **attributes: object) -> str:
    """Write a whole SVG document as text."""
    view = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}"}
    return element("svg", *children, **view, **attributes)


def image(
    data: str | bytes,
    alt: str,
    width: int,
    height: int,
    kind: str = "image/svg+xml",
    css_class: str = "cellmesh",
) -> str:
    """Write an ``<img>`` with its data in it.

    Args:
        data: an SVG document, or another picture.
        alt: description of the picture.
        width, height: displayed size, in pixels; smaller if the page is narrow.
        kind: MIME type of the picture.
        css_class: CSS class of the element.
    """
    words = html.escape(alt, quote=True)
    encoded = base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
    return (
        f'<img class="{css_class}" width="{width}" height="{height}" alt="{words}" title="{words}" '
        'style="display:block;max-width:100%;height:auto;image-rendering:pixelated" '
        f'src="data:{kind};base64,{encoded}">'
    )


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
