"""Widgets of ranks in the notebook: what is passed on, and what several ranks' look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller import comms as module
from cellmesh.controller.comms import RankComms
from cellmesh.controller.output.cell import CellSink
from cellmesh.controller.output.cell_record import Displays
from cellmesh.controller.output.fold import Block, Folder, WidgetView
from cellmesh.errors import NoMeshError
from cellmesh.wire.codec import Parcel
from cellmesh.wire.comms import FromFrontEnd, ToFrontEnd
from cellmesh.wire.output import Display

VIEW = "application/vnd.jupyter.widget-view+json"


class Front:
    """A kernel's front end, and one rank's comm "m", which is opened in a cell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.sent: list[FromFrontEnd] = []
        self.ends: list[Callable[[], None]] = []
        self.failure: Exception | None = None
        session = SimpleNamespace(
            send=lambda socket, kind, content, **keys: self.heard.append((kind, content))
        )
        kernel = SimpleNamespace(session=session, iopub_socket=None)
        cell = module._Cell(kernel, {}, lambda kind, content: self.notes.append(content["text"]))
        monkeypatch.setattr(module, "_calling_cell", lambda last: cell)
        self.comms = RankComms(self.send, lambda ranks: {})
        self.comms.began(1)

    def send(self, rank: int, verb: FromFrontEnd, buffers: Any, publish: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        self.sent.append(verb)
        return SimpleNamespace(
            number=len(self.sent), on_end=self.ends.append, wait=lambda timeout_s: None
        )

    def open(self, content: dict[str, Any]) -> None:
        content = {"target_name": "ours", **content}
        self.comms.take(1, (0,), Parcel(ToFrontEnd(1, "m", "open", json.dumps(content).encode())))

    def say(self, content: Any) -> None:
        data = {"method": "custom", "content": content}
        self.comms._hear(self.comms._open["m"], "message", {"content": {"data": data}})


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    front = Front(monkeypatch)
    yield front
    front.comms.close(None, "the end")


def test_messages_are_passed_on_in_order(front: Front) -> None:
    front.open({"data": {}})
    for content in ("a", "b"):
        front.say(content)
    contents = [json.loads(message.content)["data"]["content"] for message in front.sent]
    assert contents == ["a", "b"]
    assert front.comms.running([0]) == (2, 1)
    for end in front.ends:
        end()
    assert front.comms.running([0]) == ()


def test_messages_for_a_busy_rank_are_bounded(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    front.open({"data": {}})
    for content in range(5):
        front.say(content)
    assert len(front.sent) == 3
    assert front.notes == ["rank 0 is busy, and its widgets are sent too many messages\n"]


def test_a_value_that_is_dropped_is_not_confirmed(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    front.open({})
    update = {"method": "update", "state": {"value": 5}}
    for _ in range(2):
        front.comms._hear(front.comms._open["m"], "message", {"content": {"data": update}})
    assert len(front.sent) == 1
    said = [content["data"].get("method") for kind, content in front.heard if kind == "comm_msg"]
    assert said == ["echo_update"]


def test_a_message_to_a_dead_rank_is_dropped(front: Front) -> None:
    front.open({"data": {}})
    front.failure = NoMeshError("the mesh has ended")
    front.say("lost")
    front.failure = None
    front.say("next")
    assert len(front.sent) == 1


def test_widget_of_a_dead_rank_stays_and_its_cell_names_the_reason(front: Front) -> None:
    front.open({"data": {}})
    front.comms.close({1}, "rank 1 has died")
    assert front.notes == []
    front.comms.close({0}, "rank 0 has died")
    assert front.notes == ["rank 0 has died\n"]
    assert [kind for kind, _ in front.heard] == ["comm_open"], "not closed"
    assert not front.comms.is_open("m")


def test_invalid_unicode_reaches_the_front_end_with_replacements(front: Front) -> None:
    front.open({"data": {"state": {"value": "\ud800x"}}})
    saying = json.dumps({"data": {"method": "custom", "content": "\udcff"}}).encode()
    front.comms.take(1, (0,), Parcel(ToFrontEnd(1, "m", "message", saying)))
    assert [content["data"] for _, content in front.heard] == [
        {"state": {"value": "?x"}},
        {"method": "custom", "content": "?"},
    ]


# ---- what is shown of several ranks' widgets


def view(model_id: str, text: str = "IntSlider(value=0)") -> bytes:
    return json.dumps(
        {"data": {"text/plain": text, VIEW: {"model_id": model_id}}, "metadata": {}}
    ).encode()


def show(blocks: list[Any], known: tuple[str, ...]) -> list[dict[str, Any]]:
    """What a front end is sent that has these widgets open."""
    published: list[dict[str, Any]] = []
    displays = Displays(is_open=lambda model_id: model_id in known)
    sink = CellSink(lambda kind, content: published.append(content["data"]), displays)
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
    heading, shown = show([block], ("m0",))
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


def test_a_widget_that_the_front_end_does_not_know_is_named() -> None:
    (heading,) = show([Block((2, 3), WidgetView("display", view("m2"), "<b>Slider"))], ("other",))
    assert VIEW not in heading
    assert heading["text/plain"] == "[2-3] <b>Slider (not shown; `%%dist --ranks 2` shows rank 2's)"
    assert "&lt;b&gt;Slider" in heading["text/html"]
