"""Tabs for each rank's own output, below a cell whose ranks' output differs. Pure.

The tabs are `<details>` elements of one name, so that they need no kernel and no script, and are
part of the saved notebook. A style sheet makes them look like tabs; if a viewer strips it
(untrusted notebooks) or does not support it, each element expands in place; if the viewer strips
the name as well, several elements can be open.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Mapping, Sequence

from ...wire.ranks import describe_ranks, format_ranks, group_ranks
from .fold import Gap, Item, Line, Ranks, Rich, Trace
from .mime_bundle import pre, still
from .terminal import as_html

LIMIT_BYTES = 200_000
_MAX_GROUPS = 256
_BLOCK_BYTES = 220  # size of the HTML around a block of text
_STDERR = "background-color:rgba(219,70,55,.13);"

_CSS = """<style>
.cellmesh-ranks>details>summary:hover{opacity:1!important}
.cellmesh-ranks>details>summary:focus-visible{outline:2px solid #3b82f6;outline-offset:1px}
.cellmesh-ranks>details[open]>summary{opacity:1!important;font-weight:bold!important;border-color:#3b82f6!important}
@supports selector(::details-content){
.cellmesh-ranks>details{display:contents!important}
.cellmesh-ranks>details>summary{list-style:none}
.cellmesh-ranks>details::details-content{display:none}
.cellmesh-ranks>details[open]::details-content{display:block;order:1;flex:0 0 100%;
min-width:0;max-width:100%}
.cellmesh-ranks>details>div{width:auto!important}
}
</style>"""


def switch(
    outputs: Mapping[int, Sequence[Item]],
    dropped: Collection[int],
    identity: str,
    is_joined: bool = False,
    limit_bytes: int = LIMIT_BYTES,
    heading: Callable[[bool], str] | None = None,
) -> str:
    """Return HTML that switches between the output of ranks; only the newest part of large output.

    Args:
        outputs: rank -> its output, in order.
        dropped: ranks whose oldest output is missing in `outputs`.
        identity: unique id of the switch, hexadecimal.
        is_joined: whether the cell shows one line in place of different lines of ranks.
        limit_bytes: approximate maximum size of the HTML.
        heading: returns the text that names the mesh (`Displays`); None for no text.

    Returns:
        The HTML; "" if all ranks with output have the same, or none has more than one line, which
        the cell shows already.
    """
    shown = {
        rank: (tuple(items), rank in dropped)
        for rank, items in sorted(outputs.items())
        if items or rank in dropped
    }
    groups = [(ranks, *output) for output, ranks in group_ranks(shown).items()]
    if len(groups) < 2 or not (is_joined or any(_is_more(*output) for output in shown.values())):
        return ""
    name = f"cm-{identity}"
    first, more = groups[:_MAX_GROUPS], len(groups) - _MAX_GROUPS
    limit = (limit_bytes - len(_CSS) - 500) // len(first)
    known: dict[int, tuple[str, str]] = {}  # a cache, as ranks share most items
    details = "".join(_details(*group, name, limit, known) for group in first)
    rest = f'<span style="opacity:.7">and {more} more: %dist_logs</span>' if more > 0 else ""
    title = html.escape(f"{heading(True) if heading is not None else ''} by rank".lstrip())
    return (
        f'{_CSS}<div class="cellmesh-ranks" '
        'style="display:flex;flex-wrap:wrap;gap:2px 4px;'
        'align-items:baseline;margin:4px 0 2px;font-size:12px;line-height:1.4">'
        f'<span style="opacity:.7;margin-right:2px">{title}</span>{details}{rest}</div>'
    )


def _newest(
    items: Sequence[Item], limit_bytes: int, known: dict[int, tuple[str, str]]
) -> tuple[list[tuple[str, str]], bool]:
    """Return the newest items of a rank as HTML pieces, and whether older items were left out;
    `known` caches pieces by the item's id.
    """
    kept: list[tuple[str, str]] = []
    left = limit_bytes
    for item in reversed(items):
        if id(item) not in known:
            known[id(item)] = _piece(item)
        kind, text = known[id(item)]
        left -= len(text) + (1 if kept and kept[-1][0] == kind else _BLOCK_BYTES)
        if left < 0:
            return kept[::-1], True
        kept.append((kind, text))
    return kept[::-1], False


def _is_more(items: Sequence[Item], is_cut: bool) -> bool:
    """Return whether a rank has shown more than one line."""
    return is_cut or len(items) > 1 or any(_is_display(item) for item in items)


def _is_display(item: Item) -> bool:
    return isinstance(item, Rich) and list(item.content()["data"]) != ["text/plain"]


def _details(
    ranks: Ranks,
    items: Sequence[Item],
    is_cut: bool,
    name: str,
    limit_bytes: int,
    known: dict[int, tuple[str, str]],
) -> str:
    where = html.escape(describe_ranks(ranks), quote=True)
    before = (
        f'<details name="{name}" style="display:inline-block;max-width:100%;vertical-align:top">'
        f'<summary title="all that {where} showed" style="cursor:pointer;opacity:.7;padding:0 6px;'
        'border:1px solid rgba(128,128,128,.45);border-radius:3px;font-family:monospace">'
        f"{format_ranks(ranks)}</summary>"
        "<div "
        'style="width:100vw;max-width:100%;max-height:36em;overflow:auto;margin:3px '
        "0;padding:3px 8px;"
        'box-sizing:border-box;border-left:2px solid rgba(128,128,128,.45)">'
    )
    remark = (
        '<div style="opacity:.7">… what came before is shown above, and its text is in '
        f"<code>%dist_logs {ranks[0]}</code></div>"
    )
    pieces, is_more = _newest(items, limit_bytes - len(before) - len(remark) - 16, known)
    return f"{before}{remark if is_cut or is_more else ''}{join(pieces)}</div></details>"


def _piece(item: Item) -> tuple[str, str]:
    """Return an item of output as (kind, HTML), for `join`."""
    match item:
        case Line(stream, text):
            return stream, as_html(text)
        case Gap(num_lines, num_bytes):
            return "stdout", f"… {num_lines:,} lines ({num_bytes / 1e6:.1f} MB) not shown"
        case Trace():
            return "trace", as_html(item.traceback.rstrip())
        case Rich():
            content = item.content()
            if not _is_display(item):
                return "stdout", as_html(str(content["data"]["text/plain"]))
            return "html", f"<div>{still(content)}</div>"
    return "stdout", ""


def join(pieces: Sequence[tuple[str, str]]) -> str:
    """Join pieces (kind, HTML) into HTML; adjacent pieces of text of one kind become one block."""
    blocks: list[tuple[str, list[str]]] = []
    for kind, text in pieces:
        if blocks and blocks[-1][0] == kind:
            blocks[-1][1].append(text)
        else:
            blocks.append((kind, [text]))
    return "".join(
        "".join(texts)
        if kind == "html"
        else pre("\n".join(texts), _STDERR if kind in ("stderr", "trace") else "")
        for kind, texts in blocks
    )
