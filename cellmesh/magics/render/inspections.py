"""Draws inspected values and names of ranks without a widget: as tables, in text and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...controller.inspect import Comparison, Inspection, compare, describe_odd, look
from ...controller.ranks import Ranks
from ...wire.inspect import Names, TensorSummary
from ...wire.ranks import describe_groups, describe_ranks, format_ranks, group_ranks
from ...wire.segments import format_bytes
from .tables import Static, Table, compact_table, facts_table

# Maximum number of listed tensors in a value.
_MAX_LISTED = 50
# Limits of a view's tables, in bytes, as it is saved in the notebook's file.
_MAX_ITEMS_BYTES, _MAX_RANKS_BYTES = 7_000, 6_000
_SECTION = "margin-top:.6em"
_MAX_ITEM_TEXT = 120
_FLAG_TEXTS = {"nan": "NaN", "inf": "Inf"}
ITEM_HEADERS = (
    "shape or value", "dtype", "placements", "memory of all ranks", "mean", "std", "norm",
)  # fmt: skip
# Maximum number of different texts for one name; the others are counted.
_MAX_VARIANTS = 3


# ---- inspected values


def static_of(inspection: Inspection, path: str = "") -> Static:
    """Return an inspection drawn without a widget, as HTML and text.

    Args:
        inspection: answers of the ranks.
        path: path of the tensor that is shown in detail, if the value has several; "" for none.
    """
    by_path = inspection.by_path()
    tables, remarks = [], []
    if by_path and not inspection.is_one:
        tables.append(replace(items_table(inspection), max_bytes=_MAX_ITEMS_BYTES))
    if facts := by_path.get(path):
        comparison, spread = inspection.comparisons.get(path), inspection.spreads.get(path)
        table = facts_table(label_of(inspection.expression, path), facts, comparison, spread)
        tables.append(replace(table, max_bytes=_MAX_RANKS_BYTES))
    if not by_path:
        remarks += [f"rank {r}: {found.kind} {found.text}" for r, found in inspection.found.items()]
    if inspection.torn:
        remarks.append(torn_note(inspection.torn))
    remarks += describe_groups({rank: str(why) for rank, why in inspection.refusals.items()})
    parts = [
        f'<div style="overflow-x:auto;max-width:100%">{table._repr_html_()}</div>'
        for table in tables
    ]
    parts += [f'<div style="{_SECTION}">{html.escape(line)}</div>' for line in remarks]
    text = "\n".join([*map(repr, tables), *remarks])
    return Static(text, f'<div class="cellmesh-inspection">{"".join(parts)}</div>')


def label_of(expression: str, path: str) -> str:
    """Return the displayed name of a tensor inside an inspected value."""
    if not path:
        return expression
    return f"{expression}{path}" if path.startswith("[") else f"{expression}.{path}"


def torn_note(ranks: Collection[int]) -> str:
    """Return the note on values that were read while their ranks ran."""
    return (
        f"{describe_ranks(ranks)} ran at the same time: values may be torn, half old and half new"
    )


def list_items(inspection: Inspection) -> list[dict[str, Any]]:
    """Return the tensors in an inspected value as JSON, one row each: path, label, flags, and cells
    under `ITEM_HEADERS`. Mean and std are those of the first rank that has the tensor, the norm is
    that of all parts.
    """
    num_ranks = len(inspection.found) + len(inspection.refusals)
    return [
        {
            "path": path,
            "label": path or "(itself)",
            "flags": _flags(
                path, facts, inspection.comparisons.get(path) or compare(facts), num_ranks
            ),
            "cells": _item_cells(facts, next(iter(facts.values()))),
        }
        for path, facts in inspection.by_path().items()
    ]


def _item_cells(facts: Mapping[int, TensorSummary], one: TensorSummary) -> list[str]:
    num_bytes = sum(fact.num_bytes for fact in facts.values())
    if not one.shape:
        texts = list(dict.fromkeys(fact.text for fact in facts.values()))
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        return [texts[0][:_MAX_ITEM_TEXT] + more, one.dtype or one.kind, "", *[""] * 4]
    norms = {fact.shard: fact.norm for fact in facts.values() if fact.norm is not None}
    numbers = (one.mean, one.std, math.hypot(*norms.values()) if norms else None)
    return [
        str(tuple(one.shape)),
        one.dtype,
        one.placements,
        format_bytes(num_bytes) if num_bytes else "",
        *("" if number is None else f"{number:.4g}" for number in numbers),
    ]


def _flags(
    path: str, facts: Mapping[int, TensorSummary], comparison: Comparison, num_ranks: int
) -> list[str]:
    is_dead = path.endswith("grad") and all(
        fact.num_zeros == fact.num_elements > 0 for fact in facts.values()
    )
    words = {"dead": is_dead, "unequal": comparison.unequal, "missing": len(facts) < num_ranks}
    return [*odd_elements(facts.values()), *(word for word, holds in words.items() if holds)]


def odd_elements(summaries: Collection[TensorSummary]) -> list[str]:
    """Return the flags for tensors with NaN or infinite elements."""
    counts = {"nan": "num_nan", "inf": "num_inf"}
    return [f for f, name in counts.items() if any(getattr(one, name) for one in summaries)]


def items_table(inspection: Inspection) -> Table:
    """Return a table of the tensors in a value."""
    items = list_items(inspection)
    rows = [
        (
            item["label"],
            ", ".join(_FLAG_TEXTS.get(flag, flag) for flag in item["flags"]),
            *item["cells"],
        )
        for item in items[:_MAX_LISTED]
    ]
    left_out = len(items) - len(rows) + inspection.num_left_out
    first = next(iter(inspection.found.values()))
    words = [describe_odd(inspection.by_path()), first.text or first.kind]
    said = f"{inspection.expression}: {'; '.join(filter(None, words))}"
    more = [f"... and {left_out:,} more"] if left_out else []
    return compact_table(("name", "flags", *ITEM_HEADERS), rows, said, more)


# ---- names


def names_table(ranks: Ranks, pattern: str) -> Table:
    """Ask ranks for their variables, and return them as a table.

    Args:
        ranks: ranks to ask; busy ranks answer, too.
        pattern: pattern of the names, with ``*`` and ``?``.
    """
    looked = look(ranks.rank_set, Names(pattern))
    notes = [
        f"{describe_ranks([rank])}: {refusal}" for rank, refusal in sorted(looked.refusals.items())
    ]
    return fold_names(looked.answers, pattern, notes)


def fold_names(
    told: Mapping[int, Sequence[TensorSummary]], pattern: str, notes: list[str]
) -> Table:
    """Return a table with a row for each variable, from the answers of all ranks.

    Args:
        told: rank -> its names.
        pattern: pattern of the requested names.
        notes: lines below the table.
    """
    by_name: dict[str, dict[int, TensorSummary]] = {}
    for rank, summaries in sorted(told.items()):
        for named in summaries:
            by_name.setdefault(named.path, {})[rank] = named
    names = sorted(by_name, key=lambda name: (name.lower(), name))
    rows = [_row(name, by_name[name], list(told)) for name in names]
    headers = ["name", "type", "shape", "size", "value", "between ranks"]
    what = "names" if pattern == "*" else f"names like {pattern!r}"
    caption = "" if rows or not told else f"{describe_ranks(told)}: no {what}"
    return compact_table(headers, rows, caption, notes, wraps=True)


def _row(name: str, facts: Mapping[int, TensorSummary], ranks: list[int]) -> list[str]:
    parts = [_fold(facts, part) for part in (_type, _shape, _size, lambda each: each.text)]
    differing = [
        word
        for word, part in (("type", _full_type), ("shape", _shape), ("value", _compared))
        if len({part(each) for each in facts.values()}) > 1
    ]
    absent = [rank for rank in ranks if rank not in facts]
    says = [f"not on {describe_ranks(absent).removeprefix('ranks ')}"] if absent else []
    if differing:
        says.append(f"differ in {', '.join(differing)}")
    is_compared = len(ranks) > 1 and all(each.digest for each in facts.values())
    return [name, *parts, "; ".join(says) or ("alike" if is_compared else "")]


def _fold(facts: Mapping[int, TensorSummary], part: Callable[[TensorSummary], str]) -> str:
    """Join the ranks' texts on a variable; equal texts appear once."""
    variants = group_ranks({rank: part(each) for rank, each in facts.items()})
    if len(variants) == 1:
        return next(iter(variants))
    told = [f"[{format_ranks(ranks)}] {text or '-'}" for text, ranks in variants.items()]
    more = f", and {len(told) - _MAX_VARIANTS} more" if len(told) > _MAX_VARIANTS else ""
    return ", ".join(told[:_MAX_VARIANTS]) + more


def _type(facts: TensorSummary) -> str:
    kind = "class" if facts.kind == "type" else facts.kind.rpartition(".")[2]
    return " ".join(filter(None, (kind, facts.dtype, facts.placements)))


def _full_type(facts: TensorSummary) -> tuple[str, ...]:
    return facts.kind, facts.dtype, facts.placements


def _shape(facts: TensorSummary) -> str:
    if facts.shape is None:
        return ""
    here = "" if facts.local_shape == facts.shape else f", here {tuple(facts.local_shape or ())}"
    return f"{tuple(facts.shape)}{here}"


def _size(facts: TensorSummary) -> str:
    return format_bytes(facts.num_bytes) if facts.num_bytes else ""


def _compared(facts: TensorSummary) -> str:
    return facts.digest or facts.text
