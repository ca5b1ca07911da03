"""Writes SVG and ``<img>`` elements as text, and chooses colours and round numbers of axes."""

from __future__ import annotations

import base64
import colorsys
import html
import math

# Colours for up to eight ranks that colour-blind people can distinguish, from Paul Tol's "bright"
# scheme and from Okabe & Ito's.
_FEW = ("#4477aa", "#ee7733", "#228833", "#cc3377", "#009988", "#aa7700", "#8855bb", "#bb4444")


def colour_of(rank: int, num_ranks: int) -> str:
    """Return a rank's colour, as ``#rrggbb``."""
    if num_ranks <= len(_FEW):
        return _FEW[rank % len(_FEW)]
    red, green, blue = colorsys.hls_to_rgb(rank / num_ranks, 0.48, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


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
    svg: str,
    alt: str,
    width: int,
    height: int,
    css_class: str,
) -> str:
    """Write an ``<img>`` with an SVG document in it.

    Args:
        svg: the document.
        alt: description of the picture.
        width, height: displayed size, in pixels; smaller if the page is narrow.
        css_class: CSS class of the element.
    """
    words = html.escape(alt, quote=True)
    encoded = base64.b64encode(svg.encode()).decode()
    return (
        f'<img class="{css_class}" width="{width}" height="{height}" alt="{words}" title="{words}" '
        'style="display:block;max-width:100%;height:auto" '
        f'src="data:image/svg+xml;base64,{encoded}">'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`, for an axis."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(
        (step * factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= count),
        step * 10,
    )
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
