"""Inspections without a widget: text, and HTML that runs nothing."""

from __future__ import annotations

import html.parser
import re
from typing import Any

from cellmesh.controller.inspect import (
    Comparison,
    Inspection,
    Replicas,
    Spread,
)
from cellmesh.magics.render.inspections import static_of
from cellmesh.wire.inspect import Refusal, TensorSummary, ValueSummary


class Tags(html.parser.HTMLParser):
    """Takes HTML apart, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def tensor(**changes: Any) -> TensorSummary:
    fields: dict[str, Any] = {
        "kind": "torch.Tensor", "shape": (4, 4), "local_shape": (4, 4), "strides": (4, 1),
        "dtype": "float32",
        "device": "cpu", "min": -1.0, "max": 1.0, "mean": 0.5, "std": 0.25, "norm": 2.0,
        "digest": "aa",
        "num_elements": 16, "num_bytes": 64
    }  # fmt: skip
    return TensorSummary(**{**fields, **changes})


def inspection(items: dict[int, dict[str, TensorSummary]], **changes: Any) -> Inspection:
    found = {
        rank: ValueSummary("dict", "{…}", tuple(facts.at(path) for path, facts in of.items()))
        for rank, of in items.items()
    }
    return Inspection("w", found, **changes)


def test_one_tensor_is_a_table_and_a_histogram_for_each_rank() -> None:
    comparison = Comparison((Replicas((), ((0,), (1,))),))
    spread = Spread(-1.0, 1.0, {0: (1, 8, 7), 1: (0, 8, 8)})
    static = static_of(
        inspection(
            {0: {"": tensor()}, 1: {"": tensor(num_nan=3)}},
            comparisons={"": comparison},
            spreads={"": spread},
        )
    )
    assert "w: NaN on rank 1; replicas differ: ranks 0 ≠ 1 (%dist_check" in static.text
    assert "memory a rank" in static.text
    assert re.search(r"^1 .*\b3 +0 +0$", static.text, re.MULTILINE)
    for shown in (static.text, Tags(static.html).text):
        assert "▁█▇" in shown
        assert " ██" in shown
        assert "histograms from -1 to 1" in shown


def test_errors_stand_where_the_value_does_not() -> None:
    missing = Refusal("NameError", "name 'w' is not defined")
    refusals = {1: missing, 3: Refusal("RankDied", "was killed")}
    static = static_of(inspection({0: {"": tensor()}}, refusals=refusals))
    for shown in (static.text, Tags(static.html).text):
        assert "rank 1: NameError: name 'w' is not defined" in shown
        assert "rank 3: RankDied: was killed" in shown
    torn = ValueSummary("torch.Tensor", "", (tensor().at(""),), is_torn=True)
    text = static_of(Inspection("w", {0: torn})).text
    assert "rank 0 ran at the same time: values may be torn" in text
    nowhere = static_of(Inspection("w", {}, {0: missing, 1: missing}))
    assert nowhere.text == "ranks 0-1: NameError: name 'w' is not defined"


def test_a_nest_is_a_row_for_each_tensor() -> None:
    nest = inspection({0: {"a": tensor(), "b": tensor(num_inf=2)}, 1: {"a": tensor(digest="bb")}})
    static = static_of(nest)
    header, a, b, said = static.text.splitlines()
    assert re.match("name +flags +shape or value +dtype +memory of all ranks +mean ", header)
    assert re.match(r"a +unequal +\(4, 4\) +float32 +128 B +0.5 ", a)
    assert re.match(r"b +Inf, missing +\(4, 4\) ", b)
    assert said == "w: Inf in b (rank 0); {…}"
    chosen = static_of(nest, "b")
    assert "w.b: Inf on rank 0; one rank" in chosen.text
    assert len(chosen.text) > len(static.text)
    assert "dict {}" in static_of(Inspection("w", {0: ValueSummary("dict", "{}", ())})).text
    many = static_of(inspection({0: {f"p{index}": tensor(num_nan=1) for index in range(200)}}))
    assert "w: NaN in p0 (rank 0), p1 (rank 0), p2 (rank 0), 197 more; " in many.text
    assert "... and 150 more" in many.text


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def test_values_of_users_are_escaped() -> None:
    plain = TensorSummary(kind=HOSTILE, text=HOSTILE, digest="a")
    odd = tensor(note=HOSTILE, device=HOSTILE, placements=HOSTILE)
    found = ValueSummary(HOSTILE, HOSTILE, (odd.at(HOSTILE), plain.at("p")))
    for path in ("", HOSTILE, "p"):
        static = static_of(Inspection(HOSTILE, {0: found}, {1: Refusal(HOSTILE, HOSTILE)}), path)
        tags = Tags(static.html)
        safe = {"div", "table", "thead", "tbody", "tr", "th", "td", "pre"}
        assert {tag for tag, _ in tags.tags} <= safe
        assert not any(name.startswith("on") for _, attrs in tags.tags for name in attrs)
        assert HOSTILE in tags.text
