"""Converts the answers of ranks to the JSON that the inspector draws, grouping equal ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....controller.inspect import Comparison, Inspection, Spread, describe_odd
from ....wire.inspect import Refusal, TensorSummary
from ....wire.ranks import describe_groups, describe_ranks, format_ranks, group_ranks
from ...render.inspections import (
    ITEM_HEADERS,
    label_of,
    odd_elements,
    torn_note,
)
from ...render.svg import colour_of
from ...render.tables import facts_table, sentence_of

# Maximum number of a value's tensors in the widget's state, which is saved in the notebook.
NUM_KEPT = 200
_MAX_TEXT = 2000


def summarise(
    inspection: Inspection, items: Sequence[dict[str, Any]], stamp: int, at: str
) -> dict[str, Any]:
    """Return the overview of an inspected value as JSON: its tensors, and the ranks that lack it.

    Args:
        inspection: inspection of the value.
        items: its tensors (`list_items`).
        stamp: number of the inspection.
        at: time of the inspection, as text.
    """
    found = inspection.found
    notices = []
    if not found:
        notices = describe_groups({rank: str(why) for rank, why in inspection.refusals.items()})
    if inspection.torn:
        notices.append(torn_note(inspection.torn))
    return {
        "expression": inspection.expression,
        "stamp": stamp,
        "at": at,
        "said": ", ".join(sorted({one.kind for one in found.values()})),
        "odd": "" if inspection.is_one else describe_odd(inspection.by_path()),
        "headers": ITEM_HEADERS,
        "items": list(items[:NUM_KEPT]),
        "num_items": len(items) + inspection.num_left_out,
        "notices": notices,
        "texts": _said({rank: f"{one.kind}: {one.text}" for rank, one in found.items()}),
    }


def detail(
    expression: str,
    path: str,
    facts: Mapping[int, TensorSummary],
    refusals: Mapping[int, Refusal],
    comparison: Comparison,
    spread: Spread | None = None,
) -> dict[str, Any]:
    """Return the inspector's view of one tensor as JSON, by groups of ranks.

    Args:
        expression, path: inspected expression, and path of the tensor in its value.
        facts: rank -> summary of its tensor.
        refusals: rank -> why it has no such tensor.
        comparison: result of comparing replicas.
        spread: histograms of the ranks.
    """
    shapes = {fact.shape for fact in facts.values()}
    shape = next(iter(shapes)) if len(shapes) == 1 else None
    table = facts_table("", facts, comparison, spread)
    return {
        "path": path,
        "label": label_of(expression, path),
        "headers": table.headers,
        "rows": table.rows,
        "notes": table.notes,
        "missing": _said(refusals),
        "parts": {
            str(rank): {
                "shape": fact.local_shape,
                "offset": fact.offset or None,
                "coordinate": coordinate_of(fact),
                "is_drawable": is_drawable(fact),
            }
            for rank, fact in sorted(facts.items())
        },
        "shards": shards(shape, facts),
        "is_bad": bool(comparison.unequal or odd_elements(facts.values())),
        "said": sentence_of(facts, comparison) if facts else "",
    }


def is_drawable(facts: TensorSummary) -> bool:
    """Return whether a tensor can be drawn as a heatmap: it is dense, and its elements are
    known.
    """
    shape = facts.local_shape or ()
    is_read = facts.min is not None or facts.num_nan + facts.num_inf > 0
    is_dense = facts.strides is not None and all(size > 0 for size in shape)
    return shape != () and is_dense and is_read


def coordinate_of(facts: TensorSummary) -> str:
    """Return the mesh coordinate of a rank's part of a DTensor, in words."""
    named = zip(facts.mesh_dim_names, facts.coordinate, strict=False)
    return ",".join(f"{name}={index}" for name, index in named)


def _shared_coordinate(facts: Sequence[TensorSummary]) -> str:
    """Return the common coordinate of several parts of a DTensor, in the dims where they agree."""
    first, *others = (coordinate_of(fact).split(",") for fact in facts)
    return ",".join(part for part in first if all(part in other for other in others))


Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def blocks_of(facts: Mapping[int, TensorSummary]) -> list[Block]:
    """Return the parts of one DTensor, each with the ranks that hold it, its offset and its shape;
    [] for other tensors.
    """
    places = {
        rank: (fact.offset, fact.local_shape)
        for rank, fact in sorted(facts.items())
        if fact.placements
        and fact.local_shape is not None
        and len(fact.offset) == len(fact.local_shape)
    }
    return [(ranks, *place) for place, ranks in group_ranks(places).items()]


def name_block(ranks: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return the position of a part of a DTensor in the whole, in words."""
    if not all(shape):
        return f"{describe_ranks(ranks)}: nothing"
    spans = (f"{begin}:{begin + size}" for begin, size in zip(offset, shape, strict=True))
    return f"{describe_ranks(ranks)}: [{', '.join(spans)}]"


def shards(shape: Sequence[int] | None, facts: Mapping[int, TensorSummary]) -> dict[str, Any]:
    """Return the parts of a DTensor with their positions as JSON; two dims are drawn, and blocks
    that differ only in other dims are listed at one position.
    """
    blocks = blocks_of(facts) if shape and all(shape) else []
    drawn = [block for block in blocks if all(block[2])]
    if not drawn or not shape:
        return {"blocks": [], "height": 0, "said": ""}
    dims = range(len(shape))
    cut = [dim for dim in dims if any(part[dim] != shape[dim] for _, _, part in drawn)]
    *row_dims, col_dim = sorted([*cut, *(dim for dim in reversed(dims) if dim not in cut)][:2])
    num_rows, num_cols = shape[row_dims[0]] if row_dims else 1, shape[col_dim]
    boxes: dict[tuple[int, int, int, int], list[tuple[int, ...]]] = {}
    for ranks, offset, part in drawn:
        top, tall = (offset[row_dims[0]], part[row_dims[0]]) if row_dims else (0, 1)
        boxes.setdefault((top, tall, offset[col_dim], part[col_dim]), []).append(ranks)
    said = [f"{tuple(shape)}, {next(iter(facts.values())).placements}"]
    if len(shape) > 2:
        said.append(f"drawn: dim {row_dims[0]} downwards, dim {col_dim} across")
    if empty := [format_ranks(ranks) for ranks, _, part in blocks if not all(part)]:
        said.append(f"empty on ranks {', '.join(empty)}")
    titles = {block[0]: name_block(*block) for block in drawn}
    return {
        "blocks": [
            {
                "place": (
                    (top + layer * tall / len(shared)) / num_rows,
                    left / num_cols,
                    tall / num_rows / len(shared),
                    wide / num_cols,
                ),
                "colour": colour_of(ranks[0], max(facts) + 1),
                "rank": ranks[0],
                "ranks": format_ranks(ranks),
                "coordinate": _shared_coordinate([facts[rank] for rank in ranks]),
                "shape": str(facts[ranks[0]].local_shape),
                "title": titles[ranks],
            }
            for (top, tall, left, wide), shared in boxes.items()
            for layer, ranks in enumerate(shared)
        ],
        "height": round(min(max(560 * num_rows / num_cols, 48), 420)),
        "said": " · ".join(said),
    }


def _said(texts: Mapping[int, Any]) -> list[dict[str, str]]:
    """Join the texts of ranks (such as why a value cannot be read); equal texts appear once."""
    groups = group_ranks({rank: str(text)[:_MAX_TEXT] for rank, text in sorted(texts.items())})
    return [{"ranks": format_ranks(ranks), "text": text} for text, ranks in groups.items()]
