"""The inspector's sheets, close-ups and refreshing: what the front end is told, without one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.controller.inspect import Inspection
from cellmesh.magics.render.inspections import list_items
from cellmesh.magics.widgets.inspector.inspector import (
    Inspector,
    ask_element,
    ask_picture,
    coordinates_of,
    subtract,
)
from cellmesh.magics.widgets.inspector.view_model import (
    shards,
)
from cellmesh.wire.inspect import Pixels, TensorSummary, ValueSummary
from tests.support.inspected_ranks import LocalAnswers

CONTENT = {
    "ask": "picture", "path": "", "rank": 0, "minus": None, "dims": [0, 1], "index": [0, 0],
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
    assert coordinates_of({"dp": 2, "tp": 2}, (0, 3)) == {0: "dp=0,tp=0", 3: "dp=1,tp=1"}


def test_a_picture_of_one_rank_and_of_a_difference() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    answers = LocalAnswers("w", {0: {"w": base}, 1: {"w": base * 3}, 2: {"w": base[:2]}, 3: {}})
    one = ask_picture(answers, CONTENT)
    assert isinstance(one, Pixels)
    assert np.array_equal(one.values, base.numpy())
    difference = ask_picture(answers, {**CONTENT, "rank": 1, "minus": 0})
    assert isinstance(difference, Pixels)
    assert np.array_equal(difference.values, base.numpy() * 2)
    assert (difference.low, difference.high, difference.is_exact) == (0.0, 46.0, True)
    for changes in ({"rank": 3}, {"minus": 3}):
        missing = "rank 3: NameError: name 'w' is not defined"
        assert ask_picture(answers, {**CONTENT, **changes}) == missing


def test_a_nest_is_looked_at_closer_by_path() -> None:
    nest = {"a": torch.ones(2), "b": torch.zeros(3, 3)}
    inspector = Inspector(answers := LocalAnswers("nest", {0: {"nest": nest}}))
    assert inspector.widget.detail["label"] == "nest['a']"
    inspector._choose(inspector._rows[1]["path"])
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


# ---- differences of two ranks


STEP = 2.0**-23  # from 1 to the next float32
DIFFERENCE = {**CONTENT, "rank": 1, "minus": 0, "rows": [0, 2], "cols": [0, 2]}
PAIRS = {
    "float32": (torch.float32, 1.0, 1.0 + STEP, STEP),
    "int64": (torch.int64, 100_000_001, 100_000_002, 1.0),
    "bool": (torch.bool, False, True, 1.0),
    "beyond float32": (torch.float64, -1e300, 1e300, float(np.finfo(np.float32).max)),
}


def answers_of(name: str) -> LocalAnswers:
    dtype, one, other, _ = PAIRS[name]
    values = [torch.tensor([[value, one], [one, one]], dtype=dtype) for value in (one, other)]
    return LocalAnswers("w", {rank: {"w": value} for rank, value in enumerate(values)})


@pytest.mark.parametrize("name", PAIRS)
def test_pictures_of_two_ranks_are_subtracted(name: str) -> None:
    found = ask_picture(answers_of(name), DIFFERENCE)
    assert isinstance(found, Pixels)
    assert found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, [[PAIRS[name][3], 0], [0, 0]], rtol=1e-6)
    assert found.low == min(0.0, found.values[0, 0])


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("float32", "1.1920929e-07 (1.0000001192092896 − 1.0)"),
        ("bool", "not equal (True − False)"),
    ],
)
def test_elements_of_two_ranks_are_subtracted(name: str, difference: str) -> None:
    assert ask_element(answers_of(name), DIFFERENCE) == {"text": difference}
    assert "−" not in ask_element(answers_of(name), {**DIFFERENCE, "minus": None})["text"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor([[1.0 + STEP]]), "1.0000001"),
        (torch.tensor([[2**53 + 1]]), str(2**53 + 1)),
    ],
)
def test_elements_are_exact(value: torch.Tensor, text: str) -> None:
    answers, alone = LocalAnswers("w", {1: {"w": value}}), {**DIFFERENCE, "minus": None}
    assert ask_element(answers, alone) == {"text": text}
    assert "error" in ask_element(answers, {**alone, "index": [5, 5]})


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["3", "1.5"], "1.5 (3 − 1.5)"),
        (["inf", "inf"], "nan (inf − inf)"),
        (["(1+2j)", "1.0"], "2j ((1+2j) − 1.0)"),
        ([str(2**62 + 1), str(2**62)], f"1 ({2**62 + 1} − {2**62})"),
    ],
)
def test_numbers_of_two_kinds_are_subtracted(texts: list[str], said: str) -> None:
    assert subtract(texts) == said
