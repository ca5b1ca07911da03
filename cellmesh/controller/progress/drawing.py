"""Draws blocks of progress bars as text and as HTML.

The HTML holds no script; its styles are inline, and of those that viewers leave in notebooks that
they do not trust. Colours are good on light and on dark ground.
"""

from __future__ import annotations

import html
import math

from ...wire.ranks import format_ranks
from .bars import Bars
from .rows import Member, ProgressRow, RowState, label_of

_WIDTH = 10
_BLOCKS = " ▏▎▍▌▋▊▉█"
_COLOURS: dict[RowState, str] = {
    "open": "#3b82f6",
    "done": "#22a06b",
    "short": "#8b8b8b",
    "stopped": "#d08700",
    "failed": "#e5484d",
}
_BEHIND = "#d08700"
_GROUND = "rgba(128,128,128,0.25)"
_SOFT = "opacity:0.65"
# A strip of more ranks has a line of its own.
_MAX_INLINE = 16
# What the triangle takes before what can be unfolded.
_MARKER = "18px"
_MAX_STRIPS = 3
_MAX_MEMBERS = 128


def as_lines(bars: Bars) -> list[str]:
    """Return a block of progress bars as text, a line for each bar."""
    lines = [passed] if (passed := _passed_text(bars)) else []
    width = max((len(_head(row)) for row in bars.rows), default=0)
    lines += [_line(row, width) for row in bars.rows]
    return [*lines, f"… {bars.num_more} more"] if bars.num_more else lines


def as_html(bars: Bars) -> str:
    """Return a block of progress bars as HTML."""
    width = max((len(_head(row)) for row in bars.rows), default=0)
    parts = []
    passed = _passed_text(bars)
    if passed:
        parts.append(f'<div style="margin-left:{_MARKER};{_SOFT}">{html.escape(passed)}</div>')
    num_strips = 0
    for row in bars.rows:
        wants_strip = len(row.members) > 1 and row.state != "done" and num_strips < _MAX_STRIPS
        num_strips += wants_strip
        parts.append(_row_html(row, width, wants_strip, bars.is_still))
    if bars.num_more:
        parts.append(f'<div style="margin-left:{_MARKER};{_SOFT}">… {bars.num_more} more</div>')
    style = "font-family:monospace;font-size:12px;line-height:18px;margin:2px 0"
    return f'<div style="{style}">{"".join(parts)}</div>'


# ---- text


def _head(row: ProgressRow) -> str:
    """Return a bar's label and title, indented below the bar that it is nested in."""
    return f"{label_of(row)} {'  ' * row.num_outer}{row.title}".rstrip()


def _passed_text(bars: Bars) -> str:
    if not bars.num_passed:
        return ""
    return f"… {bars.num_passed:,} earlier bar{'s' if bars.num_passed > 1 else ''}"


def _line(row: ProgressRow, width: int) -> str:
    parts = [f"{_head(row):{width}}"]
    if row.slowest is not None:
        parts.append(f"{_percent(row.slowest):>5} |{_blocks(row.slowest)}|")
    parts.append(row.counts)
    end = [f"[{row.mark}]"] if row.mark else []
    end += [text for text in (row.stats, row.note) if text]
    return "  ".join([" ".join(parts), *end])


def _percent(fraction: float) -> str:
    return f"{math.floor(fraction * 100 + 1e-9)} %"


def _blocks(fraction: float) -> str:
    whole, part = divmod(int(fraction * _WIDTH * 8 + 1e-9), 8)
    bar = _BLOCKS[8] * whole + (_BLOCKS[part] if part else "")
    return f"{bar:{_WIDTH}}"


# ---- HTML


def _row_html(row: ProgressRow, width: int, wants_strip: bool, is_still: bool) -> str:
    pieces = [
        f'<span style="display:inline-block;min-width:{width * 0.62:.1f}em;margin-right:8px">'
        f'<span style="{_SOFT}">{html.escape(label_of(row))}</span> '
        f"{'&nbsp;' * (2 * row.num_outer)}{html.escape(row.title)}</span>"
    ]
    if row.slowest is not None and row.fastest is not None:
        pieces.append(
            '<span style="display:inline-block;min-width:3.1em;text-align:right;margin-right:8px">'
            f"{_percent(row.slowest)}</span>"
        )
        pieces.append(_track(row.slowest, row.fastest, _COLOURS[row.state]))
    is_wide = len(row.members) > _MAX_INLINE
    if wants_strip and not is_wide:
        pieces.append(_strip(row, is_still))
    pieces.append(_span(row.counts, "margin-right:12px"))
    if row.mark:
        colour = _COLOURS[row.state] if row.state in ("failed", "stopped") else _BEHIND
        pieces.append(_span(row.mark, f"color:{colour};font-weight:bold;margin-right:12px"))
    pieces.append(_span(row.stats, f"{_SOFT};margin-right:12px"))
    if row.note:
        pieces.append(_span(row.note, ""))
    if wants_strip and is_wide:
        pieces.append(f"<div>{_strip(row, is_still)}</div>")
    line = "".join(pieces)
    ranks = _per_rank(row, is_still)
    if not ranks:
        return f'<div style="margin-left:{_MARKER}">{line}</div>'
    # What does not fit stands below the label, and not below the triangle.
    style = f"cursor:pointer;margin-left:{_MARKER};list-style-position:outside"
    summary = f'<summary style="{style}" title="rank by rank">{line}</summary>'
    return f"<details>{summary}{ranks}</details>"


def _span(text: str, style: str) -> str:
    kept = html.escape(text).replace("  ", "&nbsp; ")
    return f'<span style="display:inline-block;{style}">{kept}</span>'


def _track(slowest: float, fastest: float, colour: str) -> str:
    """Return a bar as HTML: filled up to the slowest rank, pale up to the fastest."""
    fill = "display:inline-block;height:10px;vertical-align:top"
    pieces = f'<span style="{fill};width:{slowest * 100:.1f}%;background-color:{colour}"></span>'
    if fastest > slowest:
        width = (fastest - slowest) * 100
        pieces += (
            "<span "
            f'style="{fill};width:{width:.1f}%;background-color:{colour};opacity:0.35"></span>'
        )
    style = (
        "display:inline-block;width:120px;height:10px;vertical-align:middle;font-size:0;"
        "line-height:10px;white-space:nowrap;border-radius:2px;overflow:hidden;margin-right:8px;"
        f"background-color:{_GROUND}"
    )
    return f'<span style="{style}">{pieces}</span>'


def _strip(row: ProgressRow, is_still: bool) -> str:
    """Return HTML with a small column for each rank's progress, and its numbers as a tooltip.

    While it moves, each redrawing would hide them again.
    """
    columns = []
    for member in row.members:
        fraction = 1.0 if member.fraction is None else member.fraction
        colour = _COLOURS[member.state]
        if member.state == "open" and member.rank in row.marked:
            colour = _BEHIND
        title = ""
        if is_still or row.state != "open":
            title = f' title="{html.escape(f"rank {member.rank}: {member.text}", quote=True)}"'
        height = round(fraction * 12)
        columns.append(
            f"<span{title} "
            'style="display:inline-block;width:6px;height:12px;margin-right:1px;'
            f'background-color:{_GROUND};vertical-align:middle"><span '
            f'style="display:block;height:{height}px;margin-top:{12 - height}px;'
            f'background-color:{colour}"></span></span>'
        )
    return (
        '<span style="display:inline-block;vertical-align:middle;font-size:0;line-height:14px;'
        'margin-right:10px">'
        f"{''.join(columns)}</span>"
    )


def _per_rank(row: ProgressRow, is_still: bool) -> str:
    """Return a line for each group of ranks with equal progress; "" while the bar moves, or where
    all ranks are equal.

    Each redrawing would fold it again.
    """
    if not is_still and any(member.state == "open" for member in row.members):
        return ""
    groups: dict[tuple[str, RowState], list[Member]] = {}
    for member in row.members:
        groups.setdefault((member.text, member.state), []).append(member)
    if len(groups) < 2:
        return ""
    lines = []
    for (text, state), members in list(groups.items())[:_MAX_MEMBERS]:
        name = f"[{format_ranks([member.rank for member in members])}]"
        fraction = members[0].fraction
        track = "" if fraction is None else _track(fraction, fraction, _COLOURS[state])
        colour = f"color:{_COLOURS[state]}" if state in ("failed", "stopped") else ""
        lines.append(
            f'<div style="margin-left:{_MARKER}"><span '
            f'style="display:inline-block;min-width:5em;{_SOFT}">'
            f"{name}</span>{track}{_span(text, colour)}</div>"
        )
    return "".join(lines)
