"""The switch to each rank's own output (tabs), below a cell whose ranks printed different things.

Pure: what each rank has shown goes in, HTML comes out. It is `<details>` elements of one name and
nothing else, so that it needs no kernel and no script, and is in the saved notebook. A style sheet
makes them look like tabs; where it is stripped (untrusted notebooks) or too new, they open where
they stand; where the name is stripped, too, several can be open. A script, where scripts run,
remembers which was open when the page is loaded again.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ...wire.ranks import describe_ranks, format_ranks, group_ranks
from .cell_record import RecordedOutput, share
from .fold import Gap, Item, Line, Ranks, Rich, Trace
from .mime_bundle import label, pre, still
from .terminal import as_html

LIMIT_BYTES = 200_000
_MAX_GROUPS = 256
_BLOCK_BYTES = 220  # of HTML round a block of text
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

# Ids are ours and hexadecimal: nothing of the user's is in it.
_SCRIPT = """<script>(() => {
const root = document.getElementById("ID"); if (!root) return;
const all = () => [...root.querySelectorAll(":scope > details")];
try {
  const last = all()[sessionStorage.getItem("ID")]; if (last) last.open = true;
  root.addEventListener("toggle", () =>
    sessionStorage.setItem("ID", all().findIndex((each) => each.open)), true);
} catch {}
})()</script>"""


def switch(
    outputs: Mapping[int, RecordedOutput],
    identity: str,
    limit_bytes: int = LIMIT_BYTES,
    joined: Sequence[tuple[Ranks, Item]] = (),
) -> str:
    """Return HTML that switches between what each rank has shown; of large output, the newest part
    only.

    With `joined`, the lines of all ranks where some are shown as one, it has a part for these, too.

    Returns "" where there is nothing to switch: ranks that show anything show the same, or each
    shows no more than one line, which the folded view has already. `identity` is hexadecimal.
    """
    groups = _group(outputs)
    if len(groups) < 2 or (not joined and all(map(_is_one_line, groups.values()))):
        return ""
    shown = list(groups.items())[:_MAX_GROUPS]
    known: dict[int, tuple[str, str]] = {}  # groups share most items
    pieces = {ranks: _newest(output.items, limit_bytes, known) for ranks, output in shown}
    every = _newest_of_all(joined, limit_bytes)
    frames = sum(len(_details(ranks, [], f"cm-{identity}", 0, True)) for ranks, _ in shown)
    frames += len(_details((), [], f"cm-{identity}", 0, True)) if joined else 0
    budget = limit_bytes - len(_CSS) - 2 * len(_SCRIPT) - frames
    sizes = [float(sum(_costs(own))) for own in [every, *pieces.values()]]
    each = max(0, int(min(float(limit_bytes), share(sizes, budget))))
    details = _details((), every, f"cm-{identity}", each, False) if joined else ""
    details += "".join(
        _details(ranks, pieces[ranks], f"cm-{identity}", each, output.dropped != 0)
        for ranks, output in shown
    )
    more = len(groups) - len(shown)
    rest = f'<span style="opacity:.7">and {more} more: %dist_logs</span>' if more else ""
    name = f"cm-{identity}"
    return (
        f'{_CSS}<div class="cellmesh-ranks" id="{name}" '
        'style="display:flex;flex-wrap:wrap;gap:2px 4px;'
        'align-items:baseline;margin:4px 0 2px;font-size:12px;line-height:1.4">'
        f'<span style="opacity:.7;margin-right:2px">by rank</span>{details}{rest}</div>'
        f"{_SCRIPT.replace('ID', name)}"
    )


def _group(outputs: Mapping[int, RecordedOutput]) -> dict[Ranks, RecordedOutput]:
    """Group ranks that have shown the same; leave out ranks that have shown nothing."""
    shown = {
        rank: output for rank, output in sorted(outputs.items()) if output.items or output.dropped
    }
    return {ranks: output for output, ranks in group_ranks(shown).items()}


def _newest(
    items: Sequence[Item], limit_bytes: int, known: dict[int, tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the newest items of a rank as HTML pieces, one more than fits; `known` caches pieces
    by the item's id.
    """
    pieces: list[tuple[str, str]] = []
    size = 0
    for item in reversed(items):
        piece = known.get(id(item)) or _piece(item)
        known[id(item)] = piece
        pieces.append(piece)
        size += len(piece[1]) + 1
        if size > limit_bytes:
            break
    return pieces[::-1]


def _newest_of_all(lines: Sequence[tuple[Ranks, Item]], limit_bytes: int) -> list[tuple[str, str]]:
    """Return the newest lines of all ranks as HTML pieces with labels, one more than fits."""
    pieces: list[tuple[str, str]] = []
    size = 0
    for ranks, item in reversed(lines):
        kind, text = _piece(item)
        pieces.append((kind, f"{label(ranks)} {text}"))
        size += len(pieces[-1][1]) + 1
        if size > limit_bytes:
            break
    return pieces[::-1]


def _is_one_line(output: RecordedOutput) -> bool:
    return not output.dropped and len(output.items) <= 1 and not any(map(_is_rich, output.items))


def _is_rich(item: Item) -> bool:
    """Return whether an item is a display, not text."""
    return isinstance(item, Rich) and list(item.content()["data"]) != ["text/plain"]


def _details(
    ranks: Ranks, pieces: Sequence[tuple[str, str]], name: str, limit_bytes: int, is_cut: bool
) -> str:
    kept: list[tuple[str, str]] = []
    left = limit_bytes - _BLOCK_BYTES
    for (kind, text), cost in zip(reversed(pieces), reversed(_costs(pieces)), strict=True):
        left -= cost
        if left < 0:
            is_cut = True
            # An element must not be cut: only text without any can be.
            if kind != "html" and not kept and "<" not in text:
                kept.append((kind, _end_of(text, max(0, limit_bytes - _BLOCK_BYTES))))
            break
        kept.append((kind, text))
    remark = ""
    if is_cut:
        logs = f"%dist_logs {ranks[0]}" if ranks else "%dist_logs"
        remark = (
            '<div style="opacity:.7">… what came before is shown above, and its text is in '
            f"<code>{logs}</code></div>"
        )
    where = html.escape(describe_ranks(ranks), quote=True) if ranks else "all ranks"
    return (
        f'<details name="{name}" style="display:inline-block;max-width:100%;vertical-align:top">'
        f'<summary title="all that {where} showed" style="cursor:pointer;opacity:.7;padding:0 6px;'
        'border:1px solid rgba(128,128,128,.45);border-radius:3px;font-family:monospace">'
        f"{format_ranks(ranks) if ranks else 'all'}</summary>"
        "<div "
        'style="width:100vw;max-width:100%;max-height:36em;overflow:auto;margin:3px '
        "0;padding:3px 8px;"
        'box-sizing:border-box;border-left:2px solid rgba(128,128,128,.45)">'
        f"{remark}{join(kept[::-1])}</div></details>"
    )


def _costs(pieces: Sequence[tuple[str, str]]) -> list[int]:
    """Return the size in bytes of each piece of HTML with the markup around it."""
    before = ["", *(kind for kind, _ in pieces)]
    return [
        len(text) + (1 if kind == last else _BLOCK_BYTES)
        for (kind, text), last in zip(pieces, before, strict=False)
    ]


def _end_of(text: str, num_bytes: int) -> str:
    """Return the end of an escaped text without a cut entity at its start."""
    end = text[-num_bytes:] if num_bytes else ""
    at = end.find(";", 0, 8)
    return end[at + 1 :] if at >= 0 and "&" not in end[:at] else end


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
            if list(content["data"]) == ["text/plain"]:
                return "stdout", as_html(str(content["data"]["text/plain"]))
            return "html", f"<div>{still(content)}</div>"
    return "stdout", ""


def join(pieces: Sequence[tuple[str, str]]) -> str:
    """Join pieces (kind, HTML) to HTML; neighbouring pieces of text of one kind become one
    block.
    """
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
