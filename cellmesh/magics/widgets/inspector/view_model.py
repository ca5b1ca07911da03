"""Converts what ranks answer to the JSON that the inspector draws, equal ranks together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....controller.inspect.query import Inspection, QueryResult, Spread, describe_odd
from ....controller.inspect.replica_diff import Comparison
from ....wire.inspect import Gradient, Refusal, TensorSummary, ValueSummary
from ....wire.ranks import describe_groups, format_ranks, group_ranks
from ...render.drawings import blocks_of, lay_out
from ...render.inspections import label_of, torn_note
from ...render.svg import colour_of
from ...render.tables import (
    Table,
    compact_table,
    facts_table,
    format_bytes,
    group_facts,
    sentence_of,
)

# So many of a value's tensors, and of a model's gradients, are in the widget's state, and so in the
# notebook.
NUM_KEPT = 200
_MAX_TEXT, _MAX_ITEM_TEXT = 2000, 120
# Of the still table of gradients, below the value's.
_MAX_STILL_BYTES = 11_000
# Of more different norms, a row of the gradients' table has the smallest and the largest.
_MAX_NORMS = 4
_DIGITS = 4  # of a number in the gradients' table
_FLAG_TEXTS = {"nan": "NaN", "inf": "Inf", "none": "no gradient"}


def number(value: float | None) -> float | str | None:
    """Return a number as JSON has it; NaN and infinities as texts."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def list_items(inspection: Inspection) -> list[dict[str, Any]]:
    """Return the tensors in an inspected value as JSON, a row each."""
    num_ranks = len(inspection.found) + len(inspection.refusals)
    rows = []
    for path, facts in inspection.by_path().items():
        one = next(iter(facts.values()))
        num_bytes = sum(fact.num_bytes for fact in facts.values())
        rows.append(
            {
                "path": path,
                "label": path or "(itself)",
                "text": one.text[:_MAX_ITEM_TEXT] if one.is_scalar else _shape_text(one),
                "dtype": one.dtype or one.kind,
                "memory": format_bytes(num_bytes) if num_bytes else "",
                "flags": _flags(facts, inspection.comparisons.get(path), num_ranks),
            }
        )
    return rows


def _shape_text(fact: TensorSummary) -> str:
    return str(tuple(fact.shape)) if fact.shape is not None else ""


def summarise(
    inspection: Inspection, items: Sequence[dict[str, Any]], stamp: int, at: str
) -> dict[str, Any]:
    """Return the overview of an inspected value as JSON: its tensors, and the ranks that lack it.

    Args:
        inspection: of it.
        items: its tensors (`list_items`).
        stamp: of this look.
        at: when it was.
    """
    found = inspection.found
    notices = []
    if not found:
        notices = describe_groups({rank: str(why) for rank, why in inspection.refusals.items()})
    if inspection.torn:
        notices.append(torn_note(inspection.torn))
    left_out = max((one.num_left_out for one in found.values()), default=0)
    return {
        "expression": inspection.expression,
        "stamp": stamp,
        "at": at,
        "said": ", ".join(sorted({one.kind for one in found.values()})),
        "odd": "" if inspection.is_one else describe_odd(inspection.by_path()),
        "items": list(items[:NUM_KEPT]),
        "num_items": len(items) + left_out,
        "notices": notices,
        "texts": _said({rank: f"{one.kind}: {one.text}" for rank, one in found.items()}),
        "has_gradients": any(_may_have_gradients(one) for one in found.values()),
    }


def detail(
    expression: str,
    path: str,
    facts: Mapping[int, TensorSummary],
    refusals: Mapping[int, Refusal],
    coordinates: Mapping[int, str],
    comparison: Comparison,
    spread: Spread | None = None,
) -> dict[str, Any]:
    """Return everything that the inspector shows of one tensor, by groups of ranks, as JSON.

    Args:
        expression, path: which.
        facts: rank -> what it is there.
        refusals: rank -> why it is not there.
        coordinates: rank -> where it is in the mesh.
        comparison: whether replicas are equal.
        spread: histograms.
    """
    shapes = {fact.shape for fact in facts.values()}
    return {
        "path": path,
        "label": label_of(expression, path),
        "shape": next(iter(shapes)) if len(shapes) == 1 else None,
        **_table_of(facts, {} if spread is None else spread.counts),
        "missing": _said(refusals),
        "parts": {
            str(rank): {
                "shape": fact.local_shape,
                "offset": fact.offset or None,
                "coordinate": coordinate_of(fact) or coordinates.get(rank, ""),
                "is_drawable": is_drawable(fact),
            }
            for rank, fact in sorted(facts.items())
        },
        "shards": shards(next(iter(shapes)) if len(shapes) == 1 else None, facts),
        "is_bad": bool(comparison.unequal or _odd_elements(facts.values())),
        "said": sentence_of(facts, comparison) if facts else "",
        "low": None if spread is None else number(spread.low),
        "high": None if spread is None else number(spread.high),
    }


def _table_of(
    facts: Mapping[int, TensorSummary], counts: Mapping[int, Sequence[int]]
) -> dict[str, Any]:
    """Return the table of one value as JSON, a row for each group of equal ranks."""
    table = facts_table("", facts)
    groups = group_facts(facts)[1].values()
    return {
        "headers": table.headers[1:],
        "rows": [
            {
                "ranks": row[0],
                "cells": [cell[:_MAX_TEXT] for cell in row[1:]],
                "counts": counts.get(ranks[0]),
            }
            for row, ranks in zip(table.rows, groups, strict=True)
        ],
        "notes": table.notes,
    }


def is_drawable(facts: TensorSummary) -> bool:
    """Return whether a tensor can be drawn as a heatmap: readable elements, and no jagged dim."""
    shape = facts.local_shape or ()
    is_read = facts.min is not None or facts.num_nan + facts.num_inf > 0
    return shape != () and all(size > 0 for size in shape) and is_read


def coordinate_of(facts: TensorSummary) -> str:
    """Return the mesh coordinate of a rank's part of a DTensor, in words."""
    named = zip(facts.mesh_dim_names, facts.coordinate, strict=False)
    return ",".join(f"{name}={index}" for name, index in named)


def _shared_coordinate(facts: Sequence[TensorSummary]) -> str:
    """Return the coordinate of several parts of a DTensor in the dims in which they agree."""
    first, *others = (coordinate_of(fact).split(",") for fact in facts)
    return ",".join(part for part in first if all(part in other for other in others))


def shards(shape: Sequence[int] | None, facts: Mapping[int, TensorSummary]) -> dict[str, Any]:
    """Return the parts of a DTensor in their places as JSON; ranks with the same part share one."""
    parts = blocks_of(facts) if shape else []
    layout = lay_out(shape, parts) if shape else None
    if layout is None or shape is None:
        return {"blocks": [], "height": 0, "said": ""}
    num_ranks = max(facts) + 1
    said = [f"{tuple(shape)}, {next(iter(facts.values())).placements}"]
    if len(shape) > 2:
        said.append(f"drawn: dim {layout.dims[0]} downwards, dim {layout.dims[1]} across")
    if empty := [format_ranks(part.ranks) for part in parts if not all(part.shape)]:
        said.append(f"empty on ranks {', '.join(empty)}")
    if any("Partial" in fact.placements for fact in facts.values()):
        said.append("partial: the ranks' values are still to be summed")
    return {
        "blocks": [
            {
                "place": place,
                "colour": colour_of(block.ranks[0], num_ranks),
                "rank": block.ranks[0],
                "ranks": format_ranks(block.ranks),
                "coordinate": _shared_coordinate([facts[rank] for rank in block.ranks]),
                "shape": str(block.shape),
                "title": str(block),
            }
            for block, place in layout.places
        ],
        "height": layout.height_of(560, 48, 420),
        "said": " · ".join(said),
    }


def tabulate(looked: QueryResult, max_rows: int | None = None) -> dict[str, Any]:
    """Return the gradients of a model as JSON, a row for each parameter, joined over all ranks.

    Args:
        looked: a tuple of `Gradient` of each rank.
        max_rows: None for all.
    """
    by_name: dict[str, dict[int, Gradient]] = {}
    for rank in sorted(looked.answers):
        for gradient in looked.answers[rank]:
            by_name.setdefault(gradient.parameter.path, {})[rank] = gradient
    rows = [_gradient_row(name, of, len(looked.answers)) for name, of in by_name.items()]
    kept = rows if max_rows is None else rows[:max_rows]
    return {
        "rows": kept,
        "num_left_out": len(rows) - len(kept),
        "missing": _said(looked.refusals),
    }


def gradients_table(sheet: Mapping[str, Any]) -> Table:
    """Return the gradients that `tabulate` gives as an HTML or text table."""

    def text(value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"

    rows = [
        (
            row["name"],
            ", ".join(_FLAG_TEXTS.get(flag, flag) for flag in row["flags"]),
            str(tuple(row["shape"])),
            *(text(row[key]) for key in ("norm", "max_abs", "parameter_norm", "ratio")),
            str(row["num_nan"] or ""),
            str(row["num_inf"] or ""),
        )
        for row in sheet["rows"][:NUM_KEPT]
    ]
    headers = (
        "parameter",
        "flags",
        "shape",
        "norm of gradient",
        "largest",
        "norm",
        "ratio",
        "NaN",
        "Inf",
    )
    left_out = len(sheet["rows"]) - len(rows) + sheet["num_left_out"]
    notes = [f"... and {left_out:,} more"] if left_out else []
    for one in sheet["missing"]:
        who = "rank" if one["ranks"].isdecimal() else "ranks"
        notes.append(f"{who} {one['ranks']}: {one['text']}")
    return replace(compact_table(headers, rows, "", notes), max_bytes=_MAX_STILL_BYTES)


def _gradient_row(name: str, of: Mapping[int, Gradient], num_ranks: int) -> dict[str, Any]:
    # Replicas count once, by the one with the largest gradient; parts of one whole together.
    ascending = sorted(of.values(), key=lambda one: (one.grad is not None, _norm(one.grad)))
    parts = list({one.parameter.shard: one for one in ascending}.values())
    having = [one.grad for one in parts if one.grad is not None]
    norm = math.hypot(*map(_norm, having)) if having else None
    parameter_norm = math.hypot(*(_norm(one.parameter) for one in parts))
    ratio = norm / parameter_norm if norm is not None and parameter_norm else None
    num_elements = sum(grad.num_elements for grad in having)
    num_zeros = sum(grad.num_zeros for grad in having)
    digests: dict[tuple[int, ...], set[str | None]] = {}
    for one in of.values():
        digest = None if one.grad is None else one.grad.digest
        digests.setdefault(one.parameter.shard, set()).add(digest)
    grads = [one.grad for one in of.values() if one.grad is not None]
    flags = _odd_elements(grads)
    if not any(one.parameter.requires_grad for one in parts):
        flags.append("frozen")
    elif not having:
        flags.append("none")
    elif num_elements and num_zeros == num_elements:  # on all ranks
        flags.append("dead")
    if any(len(several) > 1 for several in digests.values()):
        flags.append("unequal")
    if len(of) < num_ranks:
        flags.append("missing")
    norms = {
        rank: "no gradient" if one.grad is None else f"{_norm(one.grad):.6g}"
        for rank, one in of.items()
    }
    return {
        "name": name,
        "shape": (parts[0].grad or parts[0].parameter).local_shape or (),
        "norm": number(_rounded(norm)),
        "max_abs": number(_rounded(max(map(_max_abs, having), default=None))),
        "parameter_norm": number(_rounded(parameter_norm)),
        "ratio": number(_rounded(ratio)),
        "num_nan": sum(grad.num_nan for grad in having),
        "num_inf": sum(grad.num_inf for grad in having),
        "zeros": _rounded(num_zeros / num_elements if num_elements else None),
        "flags": flags,
        "by_rank": "; ".join(_shortest(describe_groups(norms), of)),
    }


def _shortest(norms: Sequence[str], of: Mapping[int, Gradient]) -> Sequence[str]:
    """Return the norms by rank, or of many different ones the smallest and the largest."""
    if len(norms) <= _MAX_NORMS:
        return norms
    known = {rank: _norm(one.grad) for rank, one in of.items() if one.grad is not None}
    ends = [min(known, key=known.__getitem__), max(known, key=known.__getitem__)]
    named = " ... ".join(f"rank {rank}: {known[rank]:.{_DIGITS}g}" for rank in ends)
    without = len(of) - len(known)
    more = [f"{without} rank{'s' * (without > 1)} without a gradient"] if without else []
    return [named, *more]


def as_columns(sheet: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients that `tabulate` gives with each column's name once, not in each row."""
    rows: Sequence[Mapping[str, Any]] = sheet["rows"]
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return {**sheet, "rows": None, "columns": columns}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _norm(summary: TensorSummary | None) -> float:
    return 0.0 if summary is None else summary.norm or 0.0


def _max_abs(summary: TensorSummary) -> float:
    return max(abs(summary.min or 0.0), abs(summary.max or 0.0))


def _may_have_gradients(found: ValueSummary) -> bool:
    """Return whether a value is a module or optimizer, by its class's name and its parameters."""
    return any(item.requires_grad and item.path for item in found.items) or "optim" in found.kind


def _flags(
    facts: Mapping[int, TensorSummary], comparison: Comparison | None, num_ranks: int
) -> list[str]:
    flags = _odd_elements(facts.values())
    if comparison is not None and comparison.unequal:
        flags.append("unequal")
    if len(facts) < num_ranks:
        flags.append("missing")
    return flags


def _odd_elements(summaries: Collection[TensorSummary]) -> list[str]:
    counts = {
        "nan": sum(summary.num_nan for summary in summaries),
        "inf": sum(summary.num_inf for summary in summaries),
    }
    return [flag for flag, count in counts.items() if count]


def _said(texts: Mapping[int, Any]) -> list[dict[str, str]]:
    """Join the texts that ranks report (such as why a value cannot be read), equal ones once."""
    groups = group_ranks({rank: str(text)[:_MAX_TEXT] for rank, text in sorted(texts.items())})
    return [{"ranks": format_ranks(ranks), "text": text} for text, ranks in groups.items()]
