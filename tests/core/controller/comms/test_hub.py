"""Widgets between ranks and front end: what waits is merged, what is known is kept, what is
shown.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.controller.comms import hub as hubs
from cellmesh.controller.comms import inbox as inboxes
from cellmesh.controller.comms import mirror as mirrors
from cellmesh.controller.comms.hub import RankComms
from cellmesh.controller.comms.inbox import Inbox, Letter
from cellmesh.controller.comms.kernel import Cell
from cellmesh.controller.comms.mirror import Mirror
from cellmesh.controller.comms.stills import draw_still
from cellmesh.controller.output.fold import Block, Folder, WidgetView
from cellmesh.controller.output.sinks import CellSink, Displays
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Display, ToFrontEnd
from cellmesh.workers.comms import capturing
from cellmesh.workers.comms.capturing import begin_capture, captured, captured_text, end_capture
from cellmesh.workers.comms.coalescing import Updates, pack

VIEW = "application/vnd.jupyter.widget-view+json"


def update(comm: str, **state: Any) -> Letter:
    return Letter(comm, "message", {"method": "update", "state": state, "buffer_paths": []})


def click(comm: str) -> Letter:
    return Letter(comm, "message", {"method": "custom", "content": {"event": "click"}})


def drain(inbox: Inbox) -> list[Letter]:
    letters = []
    while (letter := inbox.take()) is not None:
        letters.append(letter)
    return letters


# ---- what the front end says, while a rank is busy


def test_of_a_sliders_moves_the_newest_waits() -> None:
    inbox = Inbox()
    for value in range(10_000):
        assert inbox.add(update("a", value=value))
        assert inbox.add(update("b", value=-value))
    first, second = drain(inbox)
    assert (first.comm, first.data["state"]) == ("a", {"value": 9_999})
    assert (second.comm, second.data["state"]) == ("b", {"value": -9_999})


def test_values_of_other_names_are_kept() -> None:
    inbox = Inbox()
    for letter in (update("a", x=1, y=1), update("a", y=2), update("a", z=3)):
        inbox.add(letter)
    (merged,) = drain(inbox)
    assert merged.data == {
        "method": "update",
        "state": {"x": 1, "y": 2, "z": 3},
        "buffer_paths": [],
    }


def test_updates_do_not_overtake_a_click() -> None:
    inbox = Inbox()
    for letter in (update("a", x=1), click("b"), update("a", x=2), update("a", x=3)):
        inbox.add(letter)
    letters = drain(inbox)
    assert [letter.data.get("state") for letter in letters] == [{"x": 1}, None, {"x": 3}]


def test_buffers_are_merged_with_their_paths() -> None:
    inbox = Inbox()
    older = {"method": "update", "state": {"n": 1}, "buffer_paths": [["a"], ["b", "c"]]}
    inbox.add(Letter("m", "message", older, {}, [b"A", b"C"]))
    newer = {"method": "update", "state": {"b": {}}, "buffer_paths": [["b", "d"]]}
    inbox.add(Letter("m", "message", newer, {}, [b"D"]))
    (merged,) = drain(inbox)
    assert merged.data["state"] == {"n": 1, "b": {}}
    assert dict(zip(map(tuple, merged.data["buffer_paths"]), merged.buffers, strict=True)) == {
        ("a",): b"A",
        ("b", "d"): b"D",
    }


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "MAX_WAITING", 3)
    inbox = Inbox()
    assert [inbox.add(click("a")) for _ in range(5)] == [True, True, True, False, False]
    inbox.drop("a")
    assert len(inbox) == 0


# ---- what is known of a model


def test_a_mirror_has_the_newest_of_each_value() -> None:
    mirror = Mirror(
        {"_model_name": "M", "x": 1, "data": {"shape": [2]}}, [["data", "view"]], [b"old"]
    )
    mirror.update({"x": 2}, [], [])
    assert mirror.whole() == (
        {"_model_name": "M", "x": 2, "data": {"shape": [2]}},
        [("data", "view")],
        [b"old"],
    )
    mirror.update({"data": {"shape": [3]}}, [["data", "view"]], [b"new"])
    assert mirror.whole()[1:] == ([("data", "view")], [b"new"])
    mirror.update({"data": None}, [], [])
    assert mirror.whole() == ({"_model_name": "M", "x": 2, "data": None}, [], [])
    assert mirror.entry()["model_name"] == "M"


def test_a_value_that_becomes_binary_is_no_longer_json() -> None:
    mirror = Mirror({"image": ""}, [], [])
    mirror.update({}, [["image"]], [b"png"])
    assert mirror.whole() == ({}, [("image",)], [b"png"])


def test_a_mirror_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "MAX_BYTES", 10)
    mirror = Mirror({}, [["a"]], [b"x" * 11])
    assert not mirror.is_whole
    assert mirror.whole() == ({}, [], [])


def still(*states: dict[str, Any], text: str = "W()") -> tuple[str, str]:
    mirrors = {str(number): Mirror(state, [], []) for number, state in enumerate(states)}
    return draw_still("0", mirrors, text, "rank 0 is no more")


def test_what_is_left_is_the_last_state() -> None:
    text, content = still(
        {"children": ["IPY_MODEL_1", "IPY_MODEL_2", "IPY_MODEL_3", "IPY_MODEL_4"]},
        {"description": "steps", "value": 9},
        {"value": "<script>x</script>"},
        {"description": "mode", "_options_labels": ["a", "b"], "index": 1},
        {
            "outputs": [
                {"text": "printed\n"},
                {"data": {"image/png": "iVBO\n", "text/plain": "<Figure>"}},
            ]
        },
    )
    assert text == "steps: 9\n<script>x</script>\nmode: b\nprinted\n<Figure>\nrank 0 is no more"
    assert "<script>" not in content
    assert '<img src="data:image/png;base64,iVBO"/>' in content
    assert "rank 0 is no more" in content


def test_of_a_widget_that_says_nothing_its_text_is_left() -> None:
    assert (
        still({"_model_name": "AnyModel"}, text="Figure <1>")[0] == "Figure <1>\nrank 0 is no more"
    )
    assert "Figure &lt;1&gt;" in still({"_model_name": "AnyModel"}, text="Figure <1>")[1]


def test_a_widget_within_itself_ends() -> None:
    text, _ = still({"children": ["IPY_MODEL_0", "IPY_MODEL_0"]}, text="Box()")
    assert text == "Box()\nrank 0 is no more"


# ---- what is shown of several ranks' widgets


def view(model_id: str, text: str = "IntSlider(value=0)") -> bytes:
    return json.dumps(
        {"data": {"text/plain": text, VIEW: {"model_id": model_id}}, "metadata": {}}
    ).encode()


class OpenWidgets:
    """Widgets of which some are known to the front end."""

    def __init__(self, *known: str) -> None:
        self.known = known
        self.displayed: list[str] = []

    def is_open(self, model_id: str) -> bool:
        return model_id in self.known

    def shown(self, model_id: str, publish: Any, display_id: str, text: str) -> None:
        self.displayed.append(model_id)


def show(blocks: list[Any], widgets: OpenWidgets | None) -> list[dict[str, Any]]:
    published: list[dict[str, Any]] = []
    sink = CellSink(
        lambda kind, content: published.append(content["data"]), Displays(widgets=widgets)
    )
    sink.show(blocks)
    return published


def test_widgets_of_a_class_are_one_item_with_the_lowest_ranks_model() -> None:
    folder = Folder(range(3))
    for rank in (2, 0, 1):
        folder.feed(
            (rank,), Display(1, "display", view(f"m{rank}", f"IntSlider(value={rank})")), 0.0
        )
    (block,) = folder.take(0.0)
    assert isinstance(block, Block)
    assert block.ranks == (0, 1, 2)
    assert isinstance(block.item, WidgetView)
    heading, shown = show([block], OpenWidgets("m0"))
    assert (
        heading["text/plain"] == "[0] (ranks 1-2 have one, too: `%%dist --ranks 1` shows rank 1's)"
    )
    assert shown[VIEW] == {"model_id": "m0"}


def test_widgets_of_different_classes_are_not_one() -> None:
    folder = Folder(range(2))
    folder.feed((0,), Display(1, "result", view("m0")), 0.0)
    folder.feed((1,), Display(1, "result", view("m1", "Button()")), 0.0)
    assert [
        block.ranks for block in folder.take(0.0, everything=True) if isinstance(block, Block)
    ] == [
        (0,),
        (1,),
    ]


@pytest.mark.parametrize("widgets", [OpenWidgets("other"), None])
def test_a_widget_that_the_front_end_does_not_know_is_named(widgets: OpenWidgets | None) -> None:
    (heading,) = show([Block((2, 3), WidgetView("display", view("m2"), "<b>Slider"))], widgets)
    assert VIEW not in heading
    assert heading["text/plain"] == "[2-3] <b>Slider (not shown; `%%dist --ranks 2` shows rank 2's)"
    assert "&lt;b&gt;Slider" in heading["text/html"]


def test_only_what_is_shown_is_kept_for_the_end() -> None:
    widgets = OpenWidgets("m0")
    show([Block((0,), WidgetView("display", view("m0"), "A"))], widgets)
    show([Block((1,), WidgetView("display", view("m1"), "A"))], widgets)
    assert widgets.displayed == ["m0"]


def test_a_message_that_cannot_be_sent_keeps_no_other_from_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def send(rank: int, letter: Letter) -> Any:
        sent.append(letter.data["content"])
        if letter.data["content"] == "odd":
            raise ValueError(letter.data)
        return SimpleNamespace(number=len(sent), on_end=lambda callback: callback())

    session = SimpleNamespace(send=lambda *args, **keys: None)
    cell = Cell(SimpleNamespace(session=session, iopub_socket=None), {}, lambda kind, content: None)
    monkeypatch.setattr(hubs, "_calling_cell", lambda last: cell)
    comms = RankComms(send)
    comms.began(1)
    comms.take(1, (0,), Parcel(ToFrontEnd(1, "m", "open", b'{"data": {}, "target_name": "ours"}')))
    for content in ("odd", "next"):
        with contextlib.suppress(ValueError):
            comms.hear(
                "m", "message", {"content": {"data": {"method": "custom", "content": content}}}
            )
    assert sent == ["odd", "next"]
    comms.close(None, "the end")


def test_text_that_is_no_unicode_reaches_the_front_end_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    session = SimpleNamespace(send=lambda socket, kind, content, **keys: sent.append(content))
    kernel = SimpleNamespace(session=session, iopub_socket=None)
    cell = Cell(kernel, {}, lambda kind, content: None)
    monkeypatch.setattr(hubs, "_calling_cell", lambda last: cell)
    comms = RankComms(lambda rank, letter: pytest.fail("nobody asks"))
    comms.began(1)
    opening = json.dumps({"data": {"state": {"value": "\ud800x"}}, "target_name": "ours"}).encode()
    saying = json.dumps({"data": {"method": "custom", "content": "\udcff"}}).encode()
    comms.take(1, (0,), Parcel(ToFrontEnd(1, "m", "open", opening)))
    comms.take(1, (0,), Parcel(ToFrontEnd(1, "m", "message", saying)))
    comms.close(None, "the end")
    assert [content["data"] for content in sent] == [
        {"state": {"value": "?x"}},
        {"method": "custom", "content": "?"},
        {},
    ]


# ---- on a rank


def test_updates_are_gathered_and_the_newest_value_is_sent() -> None:
    sent: list[tuple[str, dict[str, str]]] = []
    updates = Updates(lambda comm, state: sent.append((comm, dict(state))))
    values: list[int] = [1]
    updates.add("a", {"x": values})
    values.append(2)
    for number in range(1000):
        updates.add("a", {"y": number})
    updates.add("b", {"x": values})
    values.append(3)
    updates.flush()
    assert sent[0] == ("a", {"x": "[1]"}), "the first is sent at once, as it was"
    assert len(sent) < 1000
    assert sent[-2:] == [("a", {"y": "999"}), ("b", {"x": "[1, 2]"})]


def test_orders_given_by_way_of_the_state_are_all_sent() -> None:
    sent: list[str] = []
    updates = Updates(lambda comm, state: sent.append(state["order"]))
    for order in ({"n": 1}, None, {"n": 2}, None):
        updates.add("a", {"order": order})
    updates.flush()
    assert sent == ['{"n": 1}', "null", '{"n": 2}', "null"]


def test_values_are_packed_as_the_kernel_would() -> None:
    values = [
        np.int64(5),
        np.float32(0.5),
        np.arange(3),
        torch.ones(2, 1),
        {"a": (1, True)},
        range(2),
    ]
    assert pack(values) == '[5, 0.5, [0, 1, 2], [[1.0], [1.0]], {"a": [1, true]}, [0, 1]]'
    assert pack([datetime.date(2020, 1, 2), b"\x00"]) == '["2020-01-02", "AA=="]'
    with pytest.raises(TypeError, match="object has no form"):
        pack(object())
    with pytest.raises(ValueError, match="Out of range"):
        pack(float("nan"))


class Output:
    """As ipywidgets'."""

    def __init__(self) -> None:
        self.outputs: tuple[dict[str, Any], ...] = ()
        self.changed = threading.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "outputs" and "changed" in vars(self):
            self.changed.set()

    def wait_for(self, text: str) -> None:
        while self.text() != text:
            self.changed.clear()
            if self.text() != text:
                assert self.changed.wait(10), self.text()

    def text(self) -> str:
        return "".join(output.get("text", "") for output in self.outputs)


def bundle(text: str) -> bytes:
    return json.dumps({"data": {"text/plain": text}, "metadata": {}}).encode()


def test_a_widget_takes_what_its_run_prints_and_displays() -> None:
    widget = Output()
    capture = begin_capture(widget, run=4)
    assert captured_text(4, "stdout", "a")
    assert captured_text(4, "stdout", "\n")
    assert not captured_text(5, "stdout", "another run's")
    assert captured(4, "display", bundle("shown"), "d")
    assert captured(4, "update", bundle("changed"), "d")
    assert captured_text(4, "stderr", "b")
    end_capture(capture)
    assert not captured_text(4, "stdout", "after")
    assert [output["output_type"] for output in widget.outputs] == [
        "stream",
        "display_data",
        "stream",
    ]
    assert widget.text() == "a\nb"
    assert widget.outputs[1]["data"] == {"text/plain": "changed"}


def test_clearing_waits_for_what_comes() -> None:
    widget = Output()
    capture = begin_capture(widget, run=4)
    captured_text(4, "stdout", "old")
    captured(4, "clear", b"wait", "")
    assert widget.text() == "old"
    captured_text(4, "stdout", "new")
    widget.wait_for("new")
    captured(4, "clear", b"", "")
    widget.wait_for("")
    assert widget.outputs == ()
    end_capture(capture)


def test_a_flood_that_stops_is_shown_to_its_end() -> None:
    # A loop prints, and then computes for an hour: nothing more is printed, and the block does not
    # end.
    widget = Output()
    capture = begin_capture(widget, run=4)
    for number in range(40):
        captured_text(4, "stdout", f"line {number}")
        captured_text(4, "stdout", "\n")
    widget.wait_for("".join(f"line {number}\n" for number in range(40)))
    end_capture(capture)


def test_the_innermost_widget_takes_it() -> None:
    outer, inner = Output(), Output()
    first = begin_capture(outer, run=4)
    second = begin_capture(inner, run=4)
    captured_text(4, "stdout", "in")
    end_capture(second)
    captured_text(4, "stdout", "out")
    end_capture(first)
    assert (outer.text(), inner.text()) == ("out", "in")


def test_a_progress_bar_is_one_line() -> None:
    widget = Output()
    capture = begin_capture(widget, run=4)
    for text in ("\r10%", "\r20%\r", "30%", "\ndone\n"):
        captured_text(4, "stderr", text)
    end_capture(capture)
    assert widget.text() == "30%\ndone\n"


def test_a_flood_in_a_widget_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "MAX_BYTES", 1000)
    widget = Output()
    capture = begin_capture(widget, run=4)
    for number in range(1000):
        captured_text(4, "stdout" if number % 2 else "stderr", f"{number}\n" * 10)
    end_capture(capture)
    assert len(json.dumps(widget.outputs)) < 1100
    assert widget.text().endswith("999\n")
