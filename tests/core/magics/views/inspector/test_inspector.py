"""The inspector's sheets, close-ups and refreshing: what the front end is told, without one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.controller.inspect import Inspection
from cellmesh.errors import NoMeshError
from cellmesh.magics.render.inspections import list_items
from cellmesh.magics.views.inspector import inspector as inspector_module
from cellmesh.magics.views.inspector.inspector import Inspector, ask_picture
from cellmesh.magics.views.inspector.view_model import (
    shards,
)
from cellmesh.wire.inspect import Pixels, TensorSummary, ValueSummary
from tests.support.inspected_ranks import LocalAnswers

CONTENT = {
    "ask": "picture", "path": "", "rank": 0, "dims": [0, 1], "index": [0, 0],
    "rows": [0, 4], "cols": [0, 6], "height": 4, "width": 6, "reduction": "mean"
}  # fmt: skip


def part(
    rank: int, offset: tuple[int, ...], size: tuple[int, ...], name: str = "tp"
) -> TensorSummary:
    return TensorSummary(
        kind="DTensor",
        shape=(10, 6),
        local_shape=size,
        offset=offset,
        placements="Shard(dim=0)",
        dtype="float32",
        mesh_dim_names=(name,),
        coordinate=(rank,),
        shard=(rank,),
        digest=f"{rank}",
        num_elements=math.prod(size),
    )


def plain(**changes: Any) -> TensorSummary:
    facts: dict[str, Any] = {"shape": (2,), "local_shape": (2,), "dtype": "float32", "digest": "a"}
    return TensorSummary(kind="Tensor", **facts | changes)


def found(*items: TensorSummary, kind: str = "dict") -> ValueSummary:
    return ValueSummary(kind, "", items)


def test_items_are_flagged() -> None:
    good, other = plain(), plain(digest="b", num_nan=1)
    inspection = Inspection(
        "nest", {0: found(good.at("['x']"), good.at("['y']")), 1: found(other.at("['x']"))}
    )
    rows = list_items(inspection)
    assert [(row["path"], row["flags"]) for row in rows] == [
        ("['x']", ["nan", "unequal"]),
        ("['y']", ["missing"]),
    ]
    dead = {"num_elements": 4, "num_zeros": 4}
    parts = {rank: plain(norm=3.0 + rank, shard=(rank,), **dead) for rank in (0, 1)}
    (row,) = list_items(Inspection("m", {r: found(one.at("w.grad")) for r, one in parts.items()}))
    assert row["flags"] == ["dead"]
    assert row["cells"][-1] == "5"  # the norm of the whole


def test_blocks_are_in_their_places_uneven_and_empty_ones_too() -> None:
    places = {0: ((0, 0), (4, 6)), 1: ((4, 0), (4, 6)), 2: ((8, 0), (2, 6)), 3: ((10, 0), (0, 6))}
    facts = {rank: part(rank, *place) for rank, place in places.items()}
    drawn = shards((10, 6), facts)
    assert [(one["rank"], one["place"], one["coordinate"]) for one in drawn["blocks"]] == [
        (0, (0.0, 0.0, 0.4, 1.0), "tp=0"),
        (1, (0.4, 0.0, 0.4, 1.0), "tp=1"),
        (2, (0.8, 0.0, 0.2, 1.0), "tp=2"),
    ]
    assert drawn["said"].endswith("empty on ranks 3")
    (block,) = shards((10, 6), {rank: part(rank, (0, 0), (10, 6)) for rank in range(3)})["blocks"]
    assert (block["ranks"], block["coordinate"]) == ("0-2", "")
    starts = [(4 * (rank // 4), 2 * (rank // 2 % 2), rank % 2) for rank in range(8)]
    deep = {rank: part(rank, start, (4, 2, 1)) for rank, start in enumerate(starts)}
    drawn = shards((8, 4, 2), deep)  # ranks that differ in dim 2 lie below each other
    assert len({one["place"][0] for one in drawn["blocks"]}) == 4
    assert "drawn: dim 0 downwards, dim 1 across" in drawn["said"]


def test_a_picture_of_one_rank() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    answers = LocalAnswers("w", {0: {"w": base}, 3: {}})
    one = ask_picture(answers, CONTENT)
    assert isinstance(one, Pixels)
    assert np.array_equal(one.values, base.numpy())
    assert (one.low, one.high, one.is_exact) == (0.0, 23.0, True)
    missing = "rank 3: NameError: name 'w' is not defined"
    assert ask_picture(answers, {**CONTENT, "rank": 3}) == missing


def test_a_nest_is_looked_at_closer_by_path() -> None:
    nest = {"a": torch.ones(2), "b": torch.zeros(3, 3)}
    inspector = Inspector(answers := LocalAnswers("nest", {0: {"nest": nest}}))
    assert inspector.widget.detail["label"] == "nest['a']"
    inspector._path = inspector._rows[1]["path"]
    inspector._show_chosen()
    assert inspector.widget.detail["label"] == "nest['b']"
    assert inspector.widget.detail["parts"]["0"]["shape"] == (3, 3)
    del nest["b"]
    inspector.refresh()
    assert inspector.widget.detail["label"] == "nest['a']"
    inspector.view.freeze("the mesh has ended")
    num_asked = len(answers.asked)
    inspector.refresh()
    assert (len(answers.asked), inspector.widget.ended) == (num_asked, "the mesh has ended")


def test_a_question_that_cannot_be_understood_is_answered() -> None:
    inspector = Inspector(LocalAnswers("w", {0: {"w": torch.ones(3)}}))
    told: list[dict[str, Any]] = []
    widget: Any = inspector.widget
    widget.send = lambda content, buffers=(): told.append(content)
    inspector._reply({"ask": "picture", "id": 7, "rank": "none"}, "v")
    inspector._reply({"id": 8}, "v")
    inspector._reply({"id": 9, "ask": "odd"}, "v")
    inspector._reply({"id": 10, "ask": "hello"}, "v")
    assert [("error" in content) for content in told] == [True, True, True, False]


def test_the_first_page_that_sees_a_watching_inspector_after_a_cell_refreshes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(inspector_module, "do_apart", waiting.extend)
    names = {"w": torch.zeros(2)}
    inspector = Inspector(answers := LocalAnswers("w + 1", {0: names}), watch=True)
    widget = inspector.widget
    inspector.note_cell_end()  # of the cell that shows it
    assert not widget.outdated
    inspector._hear(widget, {"ask": "seen"}, [])
    do_all(waiting)
    assert shown_max(inspector) == "1"

    names["w"] = torch.full((2,), 3.0)
    inspector.note_cell_end()
    assert widget.outdated
    inspector._hear(widget, {"ask": "seen"}, [])
    do_all(waiting)
    assert not widget.outdated
    assert shown_max(inspector) == "4"
    num_asked = len(answers.asked)
    inspector._hear(widget, {"ask": "seen"}, [])  # of another page
    do_all(waiting)
    assert len(answers.asked) == num_asked

    for _ in range(2):
        inspector._hear(widget, {"ask": "refresh"}, [])
    assert len(waiting) == 1
    inspector._hear(widget, {"ask": "watch", "watch": False}, [])
    inspector.note_cell_end()
    assert not widget.outdated


def test_values_stay_shown_where_a_refresh_cannot_have_newer_ones() -> None:
    names = {"w": torch.zeros(2)}
    inspector = Inspector(answers := LocalAnswers("w + 1", {0: names}))
    names["w"] = torch.full((2,), 3.0)
    answers.busy = True
    inspector.refresh()
    assert "the rank is busy" in inspector.widget.summary["notices"][0]
    assert shown_max(inspector) == "1"
    row = {"dims": [-1, 0], "index": [0], "rows": [0, 1], "cols": [0, 2]}
    assert isinstance(ask_picture(answers, {**CONTENT, **row}), Pixels)  # of the former value
    answers.busy = False
    inspector.refresh()
    assert inspector.widget.summary["notices"] == []
    assert shown_max(inspector) == "4"

    def inspect() -> Inspection:
        raise NoMeshError("the mesh has ended")

    monkey: Any = answers
    monkey.inspect = inspect
    inspector.refresh()
    assert shown_max(inspector) == "4"


def do_all(waiting: list[Callable[[], None]]) -> None:
    while waiting:
        waiting.pop(0)()


def shown_max(inspector: Inspector) -> str:
    detail = inspector.widget.detail
    return str(detail["rows"][0][detail["headers"].index("max")])
