"""SVG as text, and pictures as ``<img>`` elements with their data in them.

Notebooks that are not trusted keep an ``<img>``, and neither ``<svg>`` nor ``<style>``.
"""

from __future__ import annotations

import base64
import html


def element(tag: str, /, *children: str, **attributes: object) -> str:
    """Write an SVG element.

    Args:
        tag: its name.
        children: elements, or text that has been escaped.
        attributes: an underscore stands for a hyphen; floats are rounded to two decimals.
    """
    words = "".join(
        f' {name.replace("_", "-")}="{_number(value)}"' for name, value in attributes.items()
    )
    return f"<{tag}{words}>{''.join(children)}</{tag}>" if children else f"<{tag}{words}/>"


def drawing(width: float, height: float, /, *children: str, **attributes: object) -> str:
    """Write a whole SVG document."""
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
        alt: what it shows, in words.
        width, height: how large it is shown, in pixels; less where there is less room.
        kind: the MIME type.
        css_class: by which pages find it.
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
