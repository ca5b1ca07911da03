"""The inspector's sheets, close-ups and refreshing: what the front end is told, without one."""

from __future__ import annotations

import dataclasses
import json
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.controller.looking.comparing import Comparison, compare
from cellmesh.controller.looking.inspecting import Inspection
from cellmesh.controller.looking.look import Looked
from cellmesh.magics.widgets.answers import coordinates_of
from cellmesh.magics.widgets.closeups import ask_element, ask_picture, small_picture, subtract
from cellmesh.magics.widgets.inspections import Printed
from cellmesh.magics.widgets.inspector import Inspector
from cellmesh.magics.widgets.refreshing import Occasion, Refresher, Worker
from cellmesh.magics.widgets.sheets import (
    NUM_KEPT,
    blocks,
    detail,
    gradients_table,
    label_of,
    list_items,
    number,
    summarise,
    tabulate,
)
from cellmesh.wire.facts import Facts
from cellmesh.wire.looks import Found, Gradient, Gradients, Item, Overview, Picture, Pixels, Refusal
from tests.core.looked_at import LocalAnswers

CONTENT = {
    "ask": "picture", "path": "", "rank": 0, "minus": None, "dims": [0, 1], "index": [0, 0],
    "rows": [0, 4], "cols": [0, 6], "height": 4, "width": 6, "reduction": "mean",
}  # fmt: skip


def part(rank: int, offset: tuple[int, ...], size: tuple[int, ...], name: str = "tp") -> Facts:
    return Facts(
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


def found(*items: Item, kind: str = "dict") -> Found:
    return Found(kind, "", items)


def test_numbers_that_json_does_not_have_are_texts() -> None:
    values = [number(value) for value in (1.5, None, math.nan, math.inf, -math.inf)]
    assert values == [1.5, None, "NaN", "Inf", "-Inf"]
    json.dumps(values, allow_nan=False)


def test_items_are_flagged() -> None:
    good = Facts(kind="Tensor", shape=(2,), local_shape=(2,), dtype="float32", digest="a")
    other = Facts(kind="Tensor", shape=(2,), local_shape=(2,), dtype="float32", digest="b", num_nan=1)
    inspection = Inspection(
        "nest",
        {0: found(Item("['x']", good), Item("['y']", good)), 1: found(Item("['x']", other))},
        {},
        {"['x']": compare({0: good, 1: other})},
    )
    rows = list_items(inspection)
    assert [(row["path"], row["flags"]) for row in rows] == [
        ("['x']", ["nan", "unequal"]),
        ("['y']", ["missing"]),
    ]


def test_a_nest_of_many_is_summarised_in_little() -> None:
    facts = Facts(kind="Tensor", shape=(2,), local_shape=(2,), dtype="float32", digest="a")
    inspection = Inspection(
        "nest", {0: Found("dict", "", tuple(Item(f"['{i}']", facts) for i in range(5000)), 7)}
    )
    summary = summarise(inspection, list_items(inspection), 1, "12:00:00")
    assert len(summary["items"]) == NUM_KEPT
    assert summary["num_items"] == 5007
    assert len(json.dumps(summary)) < 50_000


def test_where_it_is_nowhere_the_errors_are_told() -> None:
    refusal = Refusal("NameError", "name 'x' is not defined")
    summary = summarise(Inspection("x", {}, {0: refusal, 1: refusal}), [], 1, "")
    assert summary["notices"] == ["ranks 0-1: NameError: name 'x' is not defined"]


def test_torn_values_are_told() -> None:
    torn = Found("Tensor", "", (Item("", Facts(kind="Tensor")),), is_torn=True)
    summary = summarise(Inspection("x", {0: torn, 1: found(Item("", Facts(kind="Tensor")))}), [], 1, "")
    assert summary["notices"] == ["rank 0 ran meanwhile: values may be torn, half old and half new"]


def test_labels_are_expressions() -> None:
    assert [label_of("m", path) for path in ("", "weight", "['k']")] == ["m", "m.weight", "m['k']"]


def test_equal_ranks_share_a_row() -> None:
    facts = {
        rank: Facts(kind="Tensor", shape=(2,), local_shape=(2,), dtype="int8", max=rank // 2)
        for rank in range(4)
    }
    shown = detail("x", "", facts, {4: Refusal("E", "gone")}, {0: "dp=0"}, Comparison(()))
    assert [group["ranks"] for group in shown["groups"]] == ["0-1", "2-3"]
    assert shown["missing"] == [{"ranks": "4", "text": "E: gone"}]
    assert shown["parts"]["0"]["coordinate"] == "dp=0"
    assert shown["num_ranks"] == 5


def test_blocks_are_in_their_places_uneven_and_empty_ones_too() -> None:
    places = {0: ((0, 0), (4, 6)), 1: ((4, 0), (4, 6)), 2: ((8, 0), (2, 6)), 3: ((10, 0), (0, 6))}
    facts = {rank: part(rank, *place) for rank, place in places.items()}
    assert [(one["ranks"], one["offset"], one["size"]) for one in blocks(facts)] == [
        ([rank], *place) for rank, place in places.items()
    ]
    assert [one["coordinate"] for one in blocks(facts)] == ["tp=0", "tp=1", "tp=2", "tp=3"]


def test_replicas_share_a_block() -> None:
    facts = {rank: part(rank, (0, 0), (10, 6)) for rank in range(3)}
    (block,) = blocks(facts)
    assert (block["ranks_text"], block["coordinate"]) == ("0-2", "")
    assert blocks({0: Facts(kind="Tensor", shape=(2, 2), local_shape=(2, 2))}) == []


def test_the_norm_of_a_sharded_gradient_is_of_the_whole() -> None:
    def of(norm: float, shard: tuple[int, ...], **more: Any) -> tuple[Gradient, ...]:
        facts = {"num_elements": 4, "digest": str(norm), "parameter_norm": 1.0, **more}
        return (Gradient("w", (2, 2), True, norm, norm, shard=shard, **facts),)

    sheet = tabulate(Looked({0: of(3.0, (0,)), 1: of(4.0, (1,)), 2: of(3.0, (0,)), 3: of(4.0, (1,))}))
    (row,) = sheet["rows"]
    assert row["norm"] == 5.0
    assert row["flags"] == []
    (row,) = tabulate(Looked({0: of(3.0, ()), 1: of(0.0, (), num_zeros=4)}))["rows"]
    assert (row["norm"], row["flags"]) == (3.0, ["unequal"])
    (row,) = tabulate(Looked({0: of(0.0, (), num_zeros=4)}))["rows"]
    assert row["flags"] == ["dead"]
    (row,) = tabulate(Looked({0: (Gradient("w", (2,), False),)}))["rows"]
    assert (row["flags"], row["norm"]) == (["none"], None)
    sheet = tabulate(
        Looked({0: tuple(Gradient(str(i), (1,), False) for i in range(9))}, {1: Refusal("E", "no")}), 4
    )
    assert (len(sheet["rows"]), sheet["num_left_out"]) == (4, 5)
    assert "... and 5 more" in repr(gradients_table(sheet))
    assert "rank 1: E: no" in repr(gradients_table(sheet))


def test_coordinates_are_those_of_the_mesh() -> None:
    assert coordinates_of({"dp": 2, "tp": 2}, (0, 3)) == {0: "dp=0,tp=0", 3: "dp=1,tp=1"}
    assert coordinates_of({"dp": 4}, (0, 1)) == {}


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
    assert ask_picture(answers, {**CONTENT, "rank": 3}) == "rank 3: NameError: name 'w' is not defined"
    assert ask_picture(answers, {**CONTENT, "minus": 3}) == "rank 3: NameError: name 'w' is not defined"


def test_a_picture_is_never_larger_than_a_megabyte() -> None:
    answers = LocalAnswers("w", {0: {"w": torch.ones(1, 1).expand(9000, 9000)}})
    content = {
        **CONTENT,
        "rows": [0, 9000],
        "cols": [0, 9000],
        "height": 5000,
        "width": 5000,
        "reduction": "stride",
    }
    shown = ask_picture(answers, content)
    assert isinstance(shown, Pixels)
    assert shown.values.nbytes < 1_000_000


def test_elements_are_exact() -> None:
    third = torch.tensor([[1 / 3]], dtype=torch.float64)
    answers = LocalAnswers("w", {0: {"w": third}, 1: {"w": third + 1}, 2: {"w": torch.tensor([[2**53 + 1]])}})
    content = {"path": "", "rank": 0, "minus": None, "index": [0, 0]}
    assert ask_element(answers, content) == {"text": repr(1 / 3)}
    assert ask_element(answers, {**content, "rank": 2}) == {"text": str(2**53 + 1)}
    assert ask_element(answers, {**content, "rank": 1, "minus": 0})["text"].startswith("1 (1.33")
    assert "error" in ask_element(answers, {**content, "index": [5, 5]})


@pytest.mark.parametrize(
    ("texts", "said"), [(["True", "True"], "equal (True − True)"), (["(1+2j)", "1j"], "(1+1j) ((1+2j) − 1j)")]
)
def test_other_elements_are_subtracted_too(texts: list[str], said: str) -> None:
    assert subtract(texts) == said


def test_the_still_picture_is_of_the_last_two_dims() -> None:
    for shape in ((300,), (3, 4), (2, 3, 4, 5), (400, 200)):
        answers = LocalAnswers("w", {0: {"w": torch.rand(shape)}})
        inspector = Inspector(answers)
        shown = small_picture(answers, "", inspector.widget.detail)
        assert shown is not None
        assert max(shown.values.shape) <= 128
    assert small_picture(answers, "", {}) is None


def test_what_is_saved_is_small() -> None:
    answers = LocalAnswers("w", {rank: {"w": torch.rand(2000, 1000)} for rank in range(4)})
    inspector = Inspector(answers)
    state = {
        name: value for name, value in inspector.widget.get_state().items() if name not in ("_esm", "_css")
    }
    assert len(json.dumps(state, default=str)) < 20_000
    assert state["picture"] is None  # it is the page's, which makes it small


def test_a_nest_is_looked_at_closer_by_path() -> None:
    nest = {"a": torch.ones(2), "b": torch.zeros(3, 3)}
    inspector = Inspector(LocalAnswers("nest", {0: {"nest": nest}}))
    assert inspector.widget.detail["label"] == "nest['a']"
    inspector._choose(inspector._rows[1]["path"])
    assert inspector.widget.detail["label"] == "nest['b']"
    assert inspector.widget.detail["shape"] == (3, 3)
    del nest["b"]
    inspector.refresh()
    assert inspector.widget.detail["label"] == "nest['a']"


def test_while_a_rank_runs_what_was_seen_stays() -> None:
    answers = LocalAnswers("w.sum()", {0: {"w": torch.ones(3)}})
    inspector = Inspector(answers)
    before = inspector.widget.detail
    inspector.refresh("during")
    assert inspector.widget.detail == before
    assert "the rank is busy" in inspector.widget.summary["notices"][0]


def test_what_looks_by_itself_is_in_no_cells_way() -> None:
    """Ranks answer it beside their main threads, which may begin the next cell meanwhile."""
    names = {"model": torch.nn.Linear(2, 2), "w": torch.zeros(2)}
    for expression, options in (("model", {"grads": True}), ("w", {})):
        inspector = Inspector(answers := LocalAnswers(expression, {0: names, 1: names}), **options)
        answers.asked.clear()
        names["w"] = torch.full((2,), 3.0)
        inspector.refresh("after")
        subjects = [type(subject) for subject, _, is_beside in answers.asked if is_beside]
        assert {Overview} <= set(subjects)
        assert (Gradients in subjects) == bool(options)
        assert {type(subject) for subject, _, is_beside in answers.asked if not is_beside} <= {Picture}
    assert inspector.widget.detail["groups"][0]["facts"]["max"] == 3.0


@pytest.mark.parametrize("took_s", [0.1, 3.0])
def test_what_has_to_run_code_is_looked_at_by_itself_only_if_that_is_short(took_s: float) -> None:
    class TimedAnswers(LocalAnswers):
        def inspect(self, is_beside: bool) -> Inspection:
            return dataclasses.replace(super().inspect(is_beside), took_s=took_s)

    names = {"w": torch.zeros(2)}
    inspector = Inspector(answers := TimedAnswers("w + 1", {0: names}))
    names["w"] = torch.full((2,), 3.0)
    inspector.refresh("after")
    is_short = took_s < 1
    assert inspector.widget.detail["groups"][0]["facts"]["max"] == (4.0 if is_short else 1.0)
    assert inspector.widget.summary["notices"] == (
        []
        if is_short
        else ["not looked at again: that took 3.0 s, and the next cell would wait for it; press refresh"]
    )
    answers.busy = True
    inspector.refresh("after")
    assert "the rank is busy" in inspector.widget.summary["notices"][0]
    answers.busy = False
    inspector.refresh()
    assert inspector.widget.detail["groups"][0]["facts"]["max"] == 4.0
    assert inspector.widget.summary["notices"] == []


def test_a_terminal_prints_again_after_each_cell_until_something_else_is_inspected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events, ended = Events(), threading.Event()

    def show(name: str, watch: bool, follow: bool = False) -> str:
        """Show it in a cell of its own; what that prints."""
        inspector = Inspector(LocalAnswers(name, {0: names}))
        Printed(inspector, events, ended.is_set, watch, follow)._ipython_display_()
        events.trigger("post_run_cell")
        return capsys.readouterr().out

    def run() -> str:
        events.trigger("post_run_cell")
        return capsys.readouterr().out

    names = {"v": torch.zeros(2), "w": torch.zeros(2)}
    assert show("w", watch=True).count("Tensor") == 1
    names["w"] = torch.full((2,), 7.5)
    assert "7.5" in run()
    assert "w: one rank" in run()
    assert show("v", watch=True).count("Tensor") == 1
    assert "v: one rank" in run()
    assert "--follow needs a notebook" in show("v", watch=False, follow=True)
    assert run() == ""
    show("v", watch=True)
    ended.set()
    assert run() == ""
    assert not events.callbacks["post_run_cell"]


def test_what_has_ended_is_looked_at_no_more() -> None:
    answers = LocalAnswers("w", {0: {"w": torch.ones(3)}})
    inspector = Inspector(answers)
    inspector.view.freeze("the mesh has ended")
    num_asked = len(answers.asked)
    inspector.refresh()
    assert len(answers.asked) == num_asked
    assert inspector.widget.ended == "the mesh has ended"


def test_a_still_picture_is_never_of_other_values() -> None:
    answers = LocalAnswers("w", {rank: {"w": torch.full((4, 6), float(rank))} for rank in range(2)})
    inspector = Inspector(answers)
    assert inspector._pixels is not None
    inspector.answer({**CONTENT, "rank": 1, "minus": 0})
    assert inspector._pixels.high == 0.0
    inspector.answer({**CONTENT, "rank": 1})
    assert inspector._pixels.high == 1.0
    inspector._hear(inspector.widget, {"ask": "seen", "view": "v", "is_visible": True}, [])
    inspector._was_greeted = True
    inspector.refresh()
    assert inspector._pixels is None
    assert "<img" not in inspector.static().html


def test_a_page_that_was_reloaded_is_no_view_any_more() -> None:
    inspector = Inspector(
        LocalAnswers("w", {0: {"w": torch.ones(3)}}), watch=True, events=(events := Events())
    )
    assert inspector.is_seen()

    def say(kind: str, view: str, **more: Any) -> None:
        inspector._hear(inspector.widget, {"ask": kind, "view": view, "id": 1, **more}, [])

    say("hello", "first")
    say("seen", "first", is_visible=True)
    say("hello", "second")  # the first has not said goodbye
    assert not inspector.is_seen()
    say("seen", "second", is_visible=True)
    assert inspector.is_seen()
    assert events.callbacks["post_run_cell"]
    say("gone", "second")
    assert not events.callbacks["post_run_cell"]
    say("hello", "third")
    assert events.callbacks["post_run_cell"]


def test_questions_that_nobody_knows() -> None:
    inspector = Inspector(LocalAnswers("w", {0: {"w": torch.ones(3)}}))
    assert inspector.answer({"ask": "odd"}) == ({"error": "no such question: odd"}, [])
    assert inspector.answer({"ask": "hello"}) == ({}, [])


class Events:
    """A shell's events."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[..., None]]] = {"pre_run_cell": [], "post_run_cell": []}

    def register(self, name: str, callback: Callable[..., None]) -> None:
        self.callbacks[name].append(callback)

    def unregister(self, name: str, callback: Callable[..., None]) -> None:
        self.callbacks[name].remove(callback)

    def trigger(self, name: str) -> None:
        for callback in list(self.callbacks[name]):
            callback(None)


class Looks:
    """Counts what is looked at, and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen = True
        self.busy = False
        self.events = Events()
        self._looks: list[Occasion] = []
        self._condition = threading.Condition()
        self.refresher = Refresher(self._look, lambda: self.busy, lambda: self.seen, self.events, 0.001)

    def _look(self, occasion: Occasion) -> None:
        with self._condition:
            self._looks.append(occasion)
            self._condition.notify_all()

    def wait_for(self, occasion: Occasion, num: int = 1) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._looks.count(occasion) >= num, 10)

    @property
    def num(self) -> int:
        return len(self._looks)


def test_watching_looks_after_each_cell_but_the_one_that_shows_it() -> None:
    looks = Looks()
    looks.refresher.set(watches=True, follows=False)
    looks.events.trigger("post_run_cell")
    assert looks.num == 0
    for num in (1, 2):
        looks.events.trigger("pre_run_cell")
        looks.events.trigger("post_run_cell")
        looks.wait_for("after", num)


def test_what_nobody_sees_is_looked_at_when_somebody_does() -> None:
    looks = Looks()
    looks.refresher.set(watches=True, follows=False)
    looks.seen = False
    looks.events.trigger("pre_run_cell")
    looks.events.trigger("post_run_cell")
    assert looks.num == 0
    looks.seen = True
    looks.refresher.note_seen()
    looks.wait_for("after")
    looks.refresher.note_seen()  # nothing has changed since
    assert looks.num == 1
    looks.refresher.now()
    looks.wait_for("asked")


def test_following_looks_while_ranks_are_busy_and_once_more_when_they_are_not() -> None:
    looks = Looks()
    looks.refresher.set(watches=False, follows=True)
    looks.busy = True
    looks.events.trigger("pre_run_cell")
    looks.wait_for("during", 3)
    looks.events.trigger("post_run_cell")  # its run goes on in the background
    looks.wait_for("during", looks.num + 2)
    looks.busy = False
    looks.wait_for("after")
    follower = looks.refresher._follower
    if follower is not None:
        follower.join(10)
    assert looks.refresher._follower is None


def test_closed_it_hears_of_no_cell() -> None:
    looks = Looks()
    looks.refresher.set(watches=True, follows=True)
    assert all(looks.events.callbacks.values())
    looks.refresher.close()
    assert not any(looks.events.callbacks.values())
    looks.refresher.set(watches=True, follows=True)
    assert not any(looks.events.callbacks.values())


def test_a_worker_goes_on_after_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: queue.SimpleQueue[type[BaseException]] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.put(args.exc_type))
    worker, begun, go, done = Worker(), threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert go.wait(10)
        raise KeyError("rank")

    worker.do(fail)
    assert begun.wait(10)
    worker.do(done.set)
    go.set()
    assert done.wait(10)
    assert failed.get(timeout=10) is KeyError


def test_a_question_that_cannot_be_understood_is_answered() -> None:
    inspector = Inspector(LocalAnswers("w", {0: {"w": torch.ones(3)}}))
    told: list[dict[str, Any]] = []
    widget: Any = inspector.widget
    widget.send = lambda content, buffers=(): told.append(content)
    inspector._reply({"ask": "picture", "id": 7, "rank": "none"}, "v")
    inspector._reply({"id": 8}, "v")
    assert [(content["id"], "error" in content) for content in told] == [(7, True), (8, True)]


def test_a_worker_does_the_last_of_what_waits() -> None:
    worker, begun, go, done = Worker(), threading.Event(), threading.Event(), threading.Event()
    did: list[str] = []

    def first() -> None:
        begun.set()
        assert go.wait(10)
        did.append("first")

    worker.do(first, "key")
    assert begun.wait(10)
    worker.do(lambda: did.append("second"), "key")
    worker.do(lambda: did.append("third"), "key")
    worker.do(done.set)
    go.set()
    assert done.wait(10)
    assert did == ["first", "third"]
