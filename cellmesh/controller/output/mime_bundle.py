"""MIME bundles of ranks: decodes them, labels them with their ranks, and converts them to static
HTML.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping
from typing import Any

from ...wire.ranks import count_ranks
from .rank_queues import Ranks

PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def label(ranks: Ranks) -> str:
    """Return ranks as a label for output: ``[0-3,5]``."""
    return f"[{count_ranks(ranks)}]"


def heading(ranks: Ranks) -> dict[str, Any]:
    """Return a label that names ranks, as a display to be shown above a display of these ranks."""
    style = "font:11px monospace;opacity:.65;margin:2px 0"
    line = f'<div style="{style}">{html.escape(label(ranks))}</div>'
    return {"data": {"text/plain": label(ranks), "text/html": line}, "metadata": {}}


def picture(content: Mapping[str, Any], kind: str) -> str:
    """Return a bundle's image as an HTML ``<img>`` of the size in its metadata."""
    metadata = content.get("metadata", {}).get(kind, {})
    sizes = "".join(
        f' {name}="{int(metadata[name])}"'
        for name in ("width", "height")
        if isinstance(metadata, Mapping)
        and isinstance(metadata.get(name), int | float)
        and math.isfinite(metadata[name])
    )
    text = "".join(str(content["data"][kind]).split())
    return f'<img src="data:{kind};base64,{html.escape(text)}"{sizes}/>'


def still(content: Mapping[str, Any]) -> str:
    """Convert a MIME bundle to static HTML, without its ``text/html``: its picture, or else its
    text.
    """
    data = content["data"]
    for kind in PICTURES:
        if isinstance(data.get(kind), str):
            return picture(content, kind)
    if "image/svg+xml" in data:
        return _as_drawing(str(data["image/svg+xml"]))
    texts = [data[kind] for kind in ("text/markdown", "text/latex", "text/plain") if kind in data]
    return pre(html.escape(str(texts[0] if texts else ", ".join(data)), quote=False))


def pre(inner: str, style: str = "") -> str:
    """Return preformatted text as HTML; `inner` is HTML already."""
    return (
        "<pre "
        f'style="margin:0;padding:0;white-space:pre-wrap;overflow-wrap:anywhere;background:none;color:inherit;line-height:1.35;{style}">{inner}</pre>'
    )


def _as_drawing(svg: str) -> str:
    """Return an SVG as an ``<img>``: sanitizers remove ``<svg>``, and scripts in an ``<img>`` do
    not run.
    """
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" style="max-width:100%"/>'


def unpack(packed: bytes) -> Any:
    """Decode JSON of a rank; replace lone surrogates by "?", as no front end accepts them."""
    value = json.loads(packed)
    if b"\\ud" in packed:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def unpack_bundle(packed: bytes) -> dict[str, Any]:
    """Decode a MIME bundle with its metadata; replace values of invalid types.

    A bundle without a type that all viewers support has the names of its types as text.
    """
    bundle = unpack(packed)
    data, metadata = bundle.get("data"), bundle.get("metadata")
    data = data if isinstance(data, dict) else {"text/plain": str(data)}
    if data and data.keys().isdisjoint(("text/plain", "text/html", *PICTURES)):
        data["text/plain"] = f"<{', '.join(data)}>"
    return {
        **bundle,
        "data": data,
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
