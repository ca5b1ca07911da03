"""Draws an inspected value without a widget: text for terminals, HTML with small pictures
elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ...controller.inspect.query import Inspection, Spread, describe_odd
from ...controller.inspect.replica_diff import Comparison, compare
from ...wire.inspect import Pixels, TensorSummary
from ...wire.ranks import describe_groups, describe_ranks, group_ranks
from .drawings import bars_image, bars_text, blocks_of, heatmap_image, shards_image
from .tables import Static, Table, compact_table, facts_table, format_bytes

# How many of a nest's tensors are listed.
_MAX_LISTED = 50
# The view stays in the notebook's file: bytes of its tables, and how many histograms it has.
_MAX_ITEMS_BYTES, _MAX_RANKS_BYTES = 7_000, 6_000
_MAX_HISTOGRAMS = 6
_WEAK = "opacity:.75"
_SECTION = "margin-top:.6em"


def static_of(inspection: Inspection, path: str = "", picture: Pixels | None = None) -> Static:
    """Return an inspection drawn without a widget, as HTML and text.

    Args:
        inspection: what ranks told.
        path: of a nest, the tensor that is told of in full; "" for none.
        picture: a part of that tensor, as it was seen last.
    """
    by_path = inspection.by_path()
    text: list[str] = []
    parts: list[str] = []
    if by_path and not inspection.is_one:
        table = items_table(inspection)
        text.append(repr(table))
        parts.append(_scrolled(table, _MAX_ITEMS_BYTES))
    if path in by_path:
        one = _One(inspection, path, by_path[path])
        text += one.text()
        parts += one.html(picture)
    for line in _remarks(inspection, bool(by_path)):
        text.append(line)
        parts.append(f'<div style="{_SECTION}">{html.escape(line)}</div>')
    return Static("\n".join(text), f'<div class="cellmesh-inspection">{"".join(parts)}</div>')


def label_of(expression: str, path: str) -> str:
    """Return the name under which a tensor inside an inspected value is shown."""
    if not path:
        return expression
    return f"{expression}{path}" if path.startswith("[") else f"{expression}.{path}"


def torn_note(ranks: Collection[int]) -> str:
    """Return the note for values that were read while their ranks ran."""
    return (
        f"{describe_ranks(ranks)} ran at the same time: values may be torn, half old and half new"
    )


def items_table(inspection: Inspection) -> Table:
    """Return a table of the tensors in a value, with numbers of the first rank that has each."""
    by_path = inspection.by_path()
    everywhere = set(inspection.found)
    rows = []
    for path, facts in list(by_path.items())[:_MAX_LISTED]:
        one = next(iter(facts.values()))
        comparison = inspection.comparisons.get(path) or compare(facts)
        rows.append(
            (
                path or "(itself)",
                "" if set(facts) == everywhere else describe_ranks(facts),
                *_item_cells(facts, one),
                "" if len(facts) == 1 else _short(comparison),
            )
        )
    left_out = (
        len(by_path)
        - len(rows)
        + max((one.num_left_out for one in inspection.found.values()), default=0)
    )
    first = next(iter(inspection.found.values()))
    words = [describe_odd(by_path), first.text or first.kind]
    said = f"{inspection.expression}: {'; '.join(filter(None, words))}"
    more = [f"... and {left_out:,} more"] if left_out else []
    headers = (
        "name",
        "only on",
        "shape",
        "dtype",
        "placements",
        "memory of all ranks",
        "mean",
        "std",
        "norm",
        "NaN",
        "Inf",
        "replicas",
    )
    return compact_table(headers, rows, said, more)


def _item_cells(facts: Mapping[int, TensorSummary], one: TensorSummary) -> tuple[str, ...]:
    if not one.shape:
        return (_fold_texts(facts), one.dtype or one.kind, *[""] * 5, *_odd_cells(facts))
    numbers = (one.mean, one.std, one.norm)
    return (
        str(one.shape),
        one.dtype,
        one.placements,
        format_bytes(sum(fact.num_bytes for fact in facts.values())),
        *("" if number is None else f"{number:.4g}" for number in numbers),
        *_odd_cells(facts),
    )


def _odd_cells(facts: Mapping[int, TensorSummary]) -> tuple[str, str]:
    num_nan = sum(fact.num_nan for fact in facts.values())
    num_inf = sum(fact.num_inf for fact in facts.values())
    return str(num_nan or ""), str(num_inf or "")


def _fold_texts(facts: Mapping[int, TensorSummary]) -> str:
    """Return a value in words; where ranks differ, the first rank's and the number of others."""
    texts = list(dict.fromkeys(fact.text for fact in facts.values()))
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    return f"{texts[0]}{more}"


def _short(comparison: Comparison) -> str:
    """Return a word or two that say whether replicas are equal."""
    if comparison.unequal:
        return "differ: " + "; ".join(map(str, comparison.unequal))
    if comparison.unread:
        return "not compared"
    return "equal" if any(len(each.ranks) > 1 for each in comparison.replicas) else "sharded"


class _One:
    """Draws one tensor or plain value on all ranks without a widget."""

    def __init__(
        self, inspection: Inspection, path: str, facts: Mapping[int, TensorSummary]
    ) -> None:
        comparison = inspection.comparisons.get(path) or compare(facts)
        self._facts = facts
        self._table = facts_table(label_of(inspection.expression, path), facts, comparison)
        self._spread = inspection.spreads.get(path)
        self._blocks = blocks_of(facts)

    def text(self) -> list[str]:
        lines = [repr(self._table)]
        if self._spread is not None:
            groups = group_ranks(self._spread.counts)
            widest = max((len(describe_ranks(ranks)) for ranks in groups.values()), default=0)
            lines.append(f"from {self._spread.low:.4g} to {self._spread.high:.4g}:")
            lines += [
                f"  {describe_ranks(ranks).ljust(widest)}  {bars_text(counts)}"
                for counts, ranks in groups.items()
            ]
        if len(self._blocks) > 1:
            lines += [f"  {block}" for block in self._blocks]
        return lines

    def html(self, picture: Pixels | None) -> list[str]:
        parts = [_scrolled(self._table, _MAX_RANKS_BYTES)]
        if self._spread is not None:
            parts.append(_spread_html(self._spread))
        if len(self._blocks) > 1:
            shape = next(iter(self._facts.values())).shape or ()
            nothing = [str(block) for block in self._blocks if not all(block.shape)]
            caption = "; ".join(["each rank's part, in its place", *nothing])
            parts.append(_figure(shards_image(shape, self._blocks), caption))
        if picture is not None:
            low, high = f"{picture.low:.4g}", f"{picture.high:.4g}"
            parts.append(_figure(heatmap_image(picture), f"from {low} to {high}"))
        return parts


def _spread_html(spread: Spread) -> str:
    cell = "padding:2px 10px 2px 0;text-align:left;vertical-align:middle"
    groups = list(group_ranks(spread.counts).items())
    rows = "".join(
        f'<tr><td style="{cell}">{describe_ranks(ranks)}</td>'
        f'<td style="{cell}">{bars_image(counts, spread.low, spread.high)}</td></tr>'
        for counts, ranks in groups[:_MAX_HISTOGRAMS]
    )
    caption = f"from {spread.low:.4g} to {spread.high:.4g}, on all ranks alike"
    if len(groups) > _MAX_HISTOGRAMS:
        others = [rank for _, ranks in groups[_MAX_HISTOGRAMS:] for rank in ranks]
        caption += f"; those of {describe_ranks(others)} are not drawn"
    return (
        f'<table style="{_SECTION}"><tbody>{rows}</tbody></table>'
        f'<div style="{_WEAK}">{html.escape(caption)}</div>'
    )


def _scrolled(table: Table, max_bytes: int) -> str:
    table = replace(table, max_bytes=max_bytes)
    return f'<div style="overflow-x:auto;max-width:100%">{table._repr_html_()}</div>'


def _figure(drawing: str, caption: str) -> str:
    if not drawing:
        return ""
    return (
        f'<div style="{_SECTION}">{drawing}<div style="{_WEAK}">{html.escape(caption)}</div></div>'
    )


def _remarks(inspection: Inspection, is_anything_shown: bool) -> Iterator[str]:
    """Yield remarks on ranks, one per line."""
    if not is_anything_shown:
        for rank, found in inspection.found.items():
            yield f"rank {rank}: {found.kind} {found.text}"
    if inspection.torn:
        yield torn_note(inspection.torn)
    yield from describe_groups({rank: str(why) for rank, why in inspection.refusals.items()})
