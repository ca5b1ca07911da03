"""MIME bundles of ranks: decodes them, labels them with their ranks, converts them to static HTML,
and puts ranks' figures side by side.
"""

from __future__ import annotations

import base64
import html
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from ...wire.ranks import count_ranks
from .rank_queues import Ranks

PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
# Front ends that prefer HTML show a picture under its label; front ends without HTML (LaTeX, PDF)
# take the picture itself. Larger pictures are not sent twice.
_TWICE_BYTES = 1_000_000
# MIME types of bundles that can be labelled in HTML or text. Front ends prefer any other type to
# these, and would not show the label.
_ROOMY = {"text/html", "text/plain", "text/markdown", "text/latex", "image/svg+xml", *PICTURES}
_VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
    "wbr",
}  # fmt: skip
_RUNNING = ("<script", "<iframe", "<object", "<embed")
# Maximum figures and bytes of a row, as it is sent again with each new figure.
_MAX_FIGURES, _MAX_BYTES = 8, 2_000_000
_ROW = '<div style="display:flex;flex-wrap:wrap;gap:4px 12px;align-items:flex-start">'
_FITTING = "max-width:100%;height:auto"
_CELL = '<div style="flex:1 1 240px;max-width:max-content">'


def label(ranks: Ranks) -> str:
    """Return ranks as a label for output: ``[0-3,5]``."""
    return f"[{count_ranks(ranks)}]"


def html_label(ranks: Ranks) -> str:
    """Return the label of ranks as a line of HTML."""
    return (
        '<div style="font:11px monospace;opacity:.65;margin:2px '
        f'0">{html.escape(label(ranks))}</div>'
    )


def heading(ranks: Ranks) -> dict[str, Any]:
    """Return the label of ranks as a display of its own, above one that cannot be labelled."""
    return {"data": {"text/plain": label(ranks), "text/html": html_label(ranks)}, "metadata": {}}


def has_room(content: Mapping[str, Any]) -> bool:
    """Return whether `labelled` can write the ranks' label into every MIME type of a bundle that a
    front end may choose to show.
    """
    isolated = content.get("metadata", {}).get("text/html", {})
    if isinstance(isolated, Mapping) and isolated.get("isolated"):
        return False  # a page of its own
    return set(content["data"]) <= _ROOMY


def labelled(content: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the bundle with the ranks' label written above its content, in the types that allow
    it.
    """
    mark = label(ranks)
    data = dict(content["data"])
    if not has_room(content):
        # Viewers that support none of its types, as they lack an extension, show the missing types.
        if not any(kind in data for kind in ("text/plain", "text/html", *PICTURES)):
            data["text/plain"] = f"{mark} <{', '.join(data)}>"
        return {**content, "data": data}
    pictures = [kind for kind in PICTURES if isinstance(data.get(kind), str)]
    if "text/html" in data:
        data["text/html"] = f"{html_label(ranks)}{data['text/html']}"
    elif pictures:
        data["text/html"] = f"{html_label(ranks)}{picture(content, pictures[0])}"
        if len(data[pictures[0]]) > _TWICE_BYTES:
            for kind in pictures:
                del data[kind]
    elif "image/svg+xml" in data:
        data["text/html"] = f"{html_label(ranks)}{_as_drawing(str(data['image/svg+xml']))}"
    elif "text/latex" in data or "text/markdown" in data:
        text = data.pop("text/markdown", None) or data["text/latex"]
        data.pop("text/latex", None)  # some front ends prefer it, and it has no room for a label
        data["text/markdown"] = f"`{mark}`\n\n{text}"
    if "text/plain" in data:
        data["text/plain"] = f"{mark} {data['text/plain']}"
    return {**content, "data": data}


def picture(content: Mapping[str, Any], kind: str, style: str = "") -> str:
    """Return a bundle's image as an HTML ``<img>`` of the size in its metadata, with this style."""
    metadata = content.get("metadata", {}).get(kind, {})
    sizes = "".join(
        f' {name}="{int(metadata[name])}"'
        for name in ("width", "height")
        if isinstance(metadata, Mapping)
        and isinstance(metadata.get(name), int | float)
        and math.isfinite(metadata[name])
    )
    text = "".join(str(content["data"][kind]).split())
    styled = f' style="{style}"' if style else ""
    return f'<img src="data:{kind};base64,{html.escape(text)}"{sizes}{styled}/>'


def still(content: Mapping[str, Any]) -> str:
    """Convert a bundle to static HTML, with all elements closed and without scripts."""
    data = content["data"]
    written = str(data.get("text/html", ""))
    if written and not any(mark in written.lower() for mark in _RUNNING):
        return balance(written)
    for kind in PICTURES:
        if isinstance(data.get(kind), str):
            return picture(content, kind)
    if "image/svg+xml" in data:
        return _as_drawing(str(data["image/svg+xml"]))
    for kind in ("text/markdown", "text/latex"):
        if kind in data:
            return pre(html.escape(str(data[kind]), quote=False))
    if "application/json" in data:
        return pre(html.escape(json.dumps(data["application/json"], indent=1), quote=False))
    return pre(html.escape(str(data.get("text/plain", "")), quote=False))


def pre(inner: str, style: str = "") -> str:
    """Return preformatted text as HTML; `inner` is HTML already."""
    return (
        "<pre "
        f'style="margin:0;padding:0;white-space:pre-wrap;overflow-wrap:anywhere;background:none;color:inherit;line-height:1.35;{style}">{inner}</pre>'
    )


def balance(text: str) -> str:
    """Close all open elements of an HTML fragment and remove attributes that run scripts, so that
    it can be embedded in other HTML.

    Elements that run code (`_RUNNING`) are not removed.
    """
    balancer = _Balancer()
    balancer.feed(text)
    balancer.close()
    return balancer.finish()


def _as_drawing(svg: str) -> str:
    """Return an SVG as an ``<img>``: sanitizers remove ``<svg>``, and scripts in an ``<img>`` do
    not run.
    """
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" style="max-width:100%"/>'


def _written(attributes: Sequence[tuple[str, str | None]]) -> str:
    """Return an HTML element's attributes as text, without attributes that run scripts."""
    return "".join(
        f" {name}" if value is None else f' {name}="{html.escape(value)}"'
        for name, value in attributes
        if not (name.startswith("on") or name == "srcdoc" or _is_script(value or ""))
    )


def _is_script(value: str) -> bool:
    """Return whether a URL runs a script; like browsers, ignore invisible characters in it."""
    return "".join(each for each in value[:100] if each > " ").lower().startswith("javascript:")


class _Balancer(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self._pieces: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._pieces.append(f"<{tag}{_written(attrs)}>")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self._pieces.append(f"<{tag}{_written(attrs)}/>")
        if tag not in _VOID:  # in HTML, the slash of `<tag/>` is ignored
            self._pieces.append(f"</{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self._open:
            return
        while (last := self._open.pop()) != tag:
            self._pieces.append(f"</{last}>")
        self._pieces.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        # Within <svg> and <math>, browsers parse the content of <style> as elements.
        is_raw = self._open[-1:] == ["style"] and not {"svg", "math"}.intersection(self._open)
        self._pieces.append(data if is_raw else data.replace("<", "&lt;"))

    def handle_entityref(self, name: str) -> None:
        self._pieces.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._pieces.append(f"&#{name};")

    def finish(self) -> str:
        closing = [f"</{tag}>" for tag in reversed(self._open)]
        return "".join([*self._pieces, *closing])


def unpack(packed: bytes) -> Any:
    """Decode JSON of a rank; replace lone surrogates by "?", as no front end accepts them."""
    value = json.loads(packed)
    if b"\\ud" in packed:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def unpack_bundle(packed: bytes) -> dict[str, Any]:
    """Decode a MIME bundle with its metadata; replace values of invalid types."""
    bundle = unpack(packed)
    data, metadata = bundle.get("data"), bundle.get("metadata")
    return {
        **bundle,
        "data": data if isinstance(data, dict) else {"text/plain": str(data)},
        "metadata": metadata if isinstance(metadata, dict) else {},
    }


@dataclass
class FigureRow:
    """A row of figures, side by side in the order of arrival, with at most one of each rank."""

    display_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    figures: list[tuple[Ranks, Mapping[str, Any]]] = field(default_factory=list)

    def has_room(self, ranks: Ranks) -> bool:
        """Return whether a figure of these ranks can be added to this row."""
        size = sum(len(content["data"][kind_of(content)]) for _, content in self.figures)
        is_full = len(self.figures) >= _MAX_FIGURES or size > _MAX_BYTES
        return not is_full and all(set(ranks).isdisjoint(others) for others, _ in self.figures)

    def add(self, ranks: Ranks, content: dict[str, Any]) -> dict[str, Any]:
        """Add a rank's figure; return the content of the row's display."""
        self.figures.append((ranks, content))
        bundle = labelled(content, ranks) if len(self.figures) == 1 else self._side_by_side()
        return {**bundle, "transient": {"display_id": self.display_id}}

    def _side_by_side(self) -> dict[str, Any]:
        cells, texts = "", []
        for ranks, content in sorted(self.figures, key=lambda figure: figure[0]):
            figure = picture(content, kind_of(content), _FITTING)
            cells += f"{_CELL}{html_label(ranks)}{figure}</div>"
            texts.append(f"{label(ranks)} {content['data'].get('text/plain', '')}".rstrip())
        data = {"text/plain": "\n".join(texts), "text/html": f"{_ROW}{cells}</div>"}
        return {"data": data, "metadata": {}}


def kind_of(content: Mapping[str, Any]) -> str:
    """Return the picture type of a MIME bundle with one picture and otherwise only plain text; ""
    for other bundles.
    """
    kinds = content["data"].keys() - {"text/plain"}
    kind = kinds.pop() if len(kinds) == 1 else ""
    return kind if kind in PICTURES and isinstance(content["data"][kind], str) else ""
