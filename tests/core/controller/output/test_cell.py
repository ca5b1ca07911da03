"""Folded output in the output area of a notebook's cell."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest

from cellmesh.controller.output import cell_record as cell_record_module
from cellmesh.controller.output.cell import _STAYS, CellSink
from cellmesh.controller.output.cell_record import Displays
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.fold import (
    Block,
    Folder,
    Live,
    Rich,
)
from cellmesh.wire.user_code import Display, Output

from ....support.blocks import TRACE, Recorder, clear, line, rich

# ---- a notebook's cell: text


def test_lines_of_one_stream_are_one_message() -> None:
    front = Recorder()
    CellSink(front).show([line(0), line(1), line(2, stream="stderr"), line(3)])
    assert front.messages == [
        ("stream", {"name": "stdout", "text": "[0] text\n[1] text\n"}),
        ("stream", {"name": "stderr", "text": "[2] text\n"}),
        ("stream", {"name": "stdout", "text": "[3] text\n"}),
    ]


def test_a_plain_result_is_text_among_lines() -> None:
    front = Recorder()
    CellSink(front).show([line(0), rich(0, 1, kind="result", plain="42"), line(1)])
    assert front.messages == [
        ("stream", {"name": "stdout", "text": "[0] text\n[0-1] 42\n[1] text\n"})
    ]


def test_empty_output_sends_no_message() -> None:
    front = Recorder()
    CellSink(front).show([])
    assert front.messages == []


def test_a_remark_goes_to_stderr() -> None:
    front = Recorder()
    CellSink(front).note("remark")
    assert front.messages == [("stream", {"name": "stderr", "text": "remark\n"})]


def test_a_traceback_is_an_error_that_names_its_ranks() -> None:
    front = Recorder()
    CellSink(front).show([line(0), Block((0, 1, 3), TRACE)])
    kind, content = front.messages[1]
    assert kind == "error"
    assert content["ename"] == "[0-1,3] ValueError"
    assert content["evalue"] == "no"
    assert content["traceback"] == [
        "[0-1,3]",
        "Traceback (most recent call last)",
        "  line 1",
        "ValueError: no",
    ]


def test_order_is_kept_between_text_and_displays() -> None:
    front = Recorder()
    CellSink(front).show([line(0), rich(0, html="<b>"), line(1), Block((1,), TRACE), line(2)])
    assert front.kinds == ["stream", "display_data", "stream", "error", "stream"]


# ---- a notebook's cell: displays


def test_html_has_its_ranks_above_it() -> None:
    front = Recorder()
    CellSink(front).show([rich(0, 1, html="<b>bold</b>", plain="bold")])
    [data] = front.area
    assert data["text/html"].endswith("</div><b>bold</b>")
    assert "[0-1]" in data["text/html"]
    assert data["text/plain"] == "[0-1] bold"


def test_a_picture_has_its_ranks_above_it() -> None:
    front = Recorder()
    CellSink(front).show([rich(2, png="iVBORw0=\n", plain="<Figure>")])
    [data] = front.area
    assert '[2]</div><img src="data:image/png;base64,iVBORw0="/>' in data["text/html"]
    assert data["image/png"] == "iVBORw0=\n", "for those who draw no HTML"
    assert data["text/plain"] == "[2] <Figure>"


def test_figures_of_ranks_stand_side_by_side_until_something_else_is_shown() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(1, png="BBBB", plain="<Figure>"), rich(0, png="AAAA", plain="<Figure>")])
    sink.show([rich(2, 3, png="CCCC")])  # later
    [data] = front.area
    places = [
        data["text/html"].index(text) for text in ("[0]", "AAAA", "[1]", "BBBB", "[2-3]", "CCCC")
    ]
    assert places == sorted(places)
    assert data["text/plain"] == "[0] <Figure>\n[1] <Figure>\n[2-3]"
    sink.show(
        [rich(1, png="DDDD"), line(0), rich(0, png="EEEE")]
    )  # rank 1's next one; below other output
    assert len(front.area) == 4
    assert front.area[1]["image/png"] == "DDDD"
    assert front.area[3]["image/png"] == "EEEE"


def test_a_row_of_figures_is_bounded() -> None:
    front = Recorder()
    CellSink(front).show([rich(rank, png=str(rank) * 10) for rank in range(20)])
    assert len(front.area) == 3


def test_a_drawing_has_its_ranks_above_it() -> None:
    front = Recorder()
    CellSink(front).show([rich(2, svg="<svg/>")])
    [data] = front.area
    drawing = base64.b64encode(b"<svg/>").decode()
    assert f'[2]</div><img src="data:image/svg+xml;base64,{drawing}"' in data["text/html"]
    assert data["image/svg+xml"] == "<svg/>"


@pytest.mark.parametrize("key", ["latex", "markdown"])
def test_markdown_and_formulas_have_their_ranks_above_them(key: str) -> None:
    front = Recorder()
    CellSink(front).show([rich(0, 1, **{key: "$x^2$"})])
    [data] = front.area
    assert data == {"text/markdown": "`[0-1]`\n\n$x^2$"}


def test_output_without_room_for_a_label_is_shown_below_its_label() -> None:
    front = Recorder()
    CellSink(front).show(
        [rich(0, json={"a": 1}, metadata={"application/json": {"expanded": True}})]
    )
    [(_, above), (_, content)] = front.messages
    assert above["data"]["text/plain"] == "[0]"
    assert content["data"] == {"application/json": {"a": 1}, "text/plain": "[0] <application/json>"}
    assert content["metadata"] == {"application/json": {"expanded": True}}


def test_an_update_changes_the_display_that_it_names() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(0, ids=("a",), plain="first"), rich(0, ids=("b",), plain="other"), line(0)])
    sink.show([rich(0, kind="update", ids=("a",), plain="second")])
    assert front.area == [{"text/plain": "[0] second"}, {"text/plain": "[0] other"}, "[0] text\n"]


def test_ranks_may_use_the_same_id_for_displays_of_their_own() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(0, ids=("bar",), plain="zero"), rich(1, ids=("bar",), plain="one")])
    sink.show([rich(1, kind="update", ids=("bar",), plain="one, later")])
    assert front.area == [{"text/plain": "[0] zero"}, {"text/plain": "[1] one, later"}]


def test_a_shared_display_is_updated_once_for_all() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(0, 1, ids=("x", "y"), plain="10%")])
    sink.show([rich(0, 1, kind="update", ids=("x", "y"), plain="20%")])
    assert front.kinds == ["display_data", "update_display_data"]
    assert front.area == [{"text/plain": "[0-1] 20%"}]


def test_a_shared_display_follows_its_lowest_rank() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(0, 1, ids=("x", "y"), plain="10%")])
    sink.show([rich(1, kind="update", ids=("y",), plain="from rank 1")])
    sink.show([rich(0, kind="update", ids=("x",), plain="from rank 0")])
    assert front.area == [{"text/plain": "[0] from rank 0"}]


def test_an_update_of_displays_shown_apart_reaches_each_under_its_own_rank() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(0, ids=("x",), plain="zero"), rich(1, ids=("y",), plain="one")])
    sink.show([rich(0, 1, kind="update", ids=("x", "y"), plain="done")])
    assert front.area == [{"text/plain": "[0] done"}, {"text/plain": "[1] done"}]


def test_displays_that_no_longer_change_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_record_module, "_MAX_PLACES", 4)
    front, displays = Recorder(), Displays()
    sink = CellSink(front, displays)
    sink.show([rich(0, 1, ids=("old", "old"), plain="old")])
    for number in range(
        9
    ):  # each cell of the notebook has a bar that is called so, and something of its own
        sink.show([rich(0, 1, kind="update", ids=("old", "old"), plain=f"old {number}")])
        sink.show([rich(0, ids=("bar",), plain="bar"), rich(0, ids=(f"{number}",), plain="own")])
        assert len(displays.places) <= 4
    assert front.area[0] == {"text/plain": "[0-1] old 8"}
    sink.show([rich(0, kind="update", ids=("3",), plain="late")])
    assert {"text/plain": "[0] late"} not in front.area


def test_an_update_of_an_unknown_display_shows_nothing() -> None:
    front = Recorder()
    CellSink(front).show([rich(0, kind="update", ids=("nobody",), plain="x")])
    assert front.messages == []


def test_our_display_ids_are_not_the_ranks_own() -> None:
    # Two cells, or two meshes, may show displays of the same id in one notebook.
    front = Recorder()
    for _ in range(2):
        CellSink(front).show([rich(0, ids=("same",), plain="x")])
    ids = [content["transient"]["display_id"] for _, content in front.messages]
    assert len({"same", *ids}) == 3


def test_clearing_empties_the_area() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([line(0), clear(0, 1, wait=True), line(0, text="new")])
    assert front.messages[1] == ("clear_output", {"wait": True})
    assert front.area == ["[0] new\n"]


def test_rank_clears_its_own_output_and_that_of_others_is_shown_again() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show(
        [line(0, 1, text="all"), line(1, text="one"), rich(0, ids=("a",), plain="zero"), clear(1)]
    )
    assert front.area == ["[0] all\n", {"text/plain": "[0] zero"}]
    sink.show([rich(0, kind="update", ids=("a",), plain="later")])
    assert front.area == ["[0] all\n", {"text/plain": "[0] later"}], "it is still the same display"


def test_a_rank_that_waits_clears_with_its_next_output() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([line(0, 1, text="old"), clear(1, wait=True), line(0, text="more")])
    assert front.area == ["[0-1] old\n", "[0] more\n"]
    sink.show([line(1, text="new")])
    assert front.area == ["[0] old\n[0] more\n", "[1] new\n"]


def test_an_error_a_remark_and_an_unfinished_line_survive_anothers_clearing() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.note("remark")
    sink.show(
        [Block((0,), TRACE), line(1), Live((((0,), "10%"), ((1,), "20%")), closed=False), clear(1)]
    )
    assert front.area == ["remark\n", "[0] ValueError", {"text/plain": "[0] 10%"}]
    sink.show([Live((((0,), "30%"),), closed=False)])
    assert front.area[-1] == {"text/plain": "[0] 30%"}


def test_live_line_is_redrawn_after_clearing_all() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show(
        [Live((((0,), "10%"),), closed=False), clear(0), Live((((0,), "20%"),), closed=False)]
    )
    assert front.area == [{"text/plain": "[0] 20%"}]


def frames_of(sink: CellSink, front: Recorder, blocks: list[Block], num: int = 100) -> int:
    """An animation of rank 1; gives how many bytes it took."""
    before = len(json.dumps(front.messages))
    for frame in range(num):
        sink.show([clear(1, wait=True), *blocks, line(1, text=f"frame {frame}")])
    return len(json.dumps(front.messages)) - before


def test_an_animation_beside_little_leaves_nothing_of_its_earlier_frames() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([line(0, text="x" * 1000), line(1)])
    assert frames_of(sink, front, []) < 300_000
    assert front.area == [f"[0] {'x' * 1000}\n", "[1] frame 99\n"]


@pytest.mark.parametrize("num_bytes", [390_000, 1_500_000], ids=["much", "not remembered"])
def test_an_animation_beside_much_is_one_display_and_others_output_stays(num_bytes: int) -> None:
    front = Recorder()
    sink = CellSink(front, has_tabs=True)
    sink.show([line(0, text="before"), rich(0, html="A" * num_bytes), line(1, text="old")])
    cost = frames_of(sink, front, [rich(1, png="AAAA")])
    assert cost < 2_000_000
    kept = [each for each in front.area if "AAAA" * 10 in str(each)]
    assert len(kept) == 1, "others' output is there once"
    assert "[0] before" in str(front.area)
    assert str(front.area).count("what stands above stays") == 1
    pane = front.area[-1]
    assert pane["text/plain"] == "[1] \n[1] frame 99"
    assert pane["text/html"].count("<img") == 1
    assert pane["text/html"].endswith("[1] frame 99</pre></div>")
    sink.show([line(0, text="below"), Block((1,), TRACE)])
    assert front.area[-2:] == ["[0] below\n", "[1] ValueError"]
    sink.end((0, 1))
    assert "frame 99" in switches(front)[-1]
    assert "frame 98" not in switches(front)[-1]
    sink.show([clear(0, 1)])
    assert front.area == []


def test_a_rank_that_clears_in_an_old_cell_leaves_the_others() -> None:
    displays, front = Displays(), Recorder()
    sink = CellSink(front, displays)
    sink.show([line(0), line(1)])
    sink.end((0, 1))
    for _ in range(20):
        CellSink(Recorder(), displays).end((0, 1))
    sink.show([clear(1), line(1, text="new")])
    assert front.area[0] == "[0] text\n[1] text\n"
    assert front.area[-1]["text/plain"] == "[1] new"


def test_clearing_beside_much_output_is_bounded_and_shared_output_stands_below() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([rich(0, html="A" * 1_000_000), clear(1), line(1, 2, text="old"), clear(1, 2)])
    for number in range(1000):
        sink.show([line(1, text=f"{number} <b>")])
    sink.show([line(1, 2, text="both"), rich(2, html="<b onclick=x>two</b>", metadata={})])
    assert front.area[1:3] == ["[1-2] old\n", f"[1-2] {_STAYS}\n"]
    assert len(front.area) == 4
    pane = front.area[-1]
    assert pane["text/plain"].startswith("… the text above it is in %dist_logs\n[1] 952 <b>\n")
    assert "999 &lt;b&gt;\n[1-2] both</pre>" in pane["text/html"]
    assert pane["text/html"].endswith("<div><b>two</b></div></div>")
    sink.show([clear(1)])
    assert front.area[-1]["text/plain"] == "[2] both\n[2] "
    sink.show([line(0, 1, text="all"), line(1, text="after")])
    assert front.area[-1] == "[0-1] all\n[1] after\n"


# ---- what cannot be shown


@pytest.mark.parametrize(
    ("data", "metadata"),
    [
        ({"text/html": "<b>"}, [1]),
        ({"text/html": "<b>"}, {"text/html": 3}),
        ({"image/png": "iVBORw0="}, {"image/png": {"width": float("nan"), "height": float("inf")}}),
        ({"image/png": 3, "text/html": None, "text/plain": 5}, {}),
        (5, {}),
        ({}, {}),
        ({"text/html": "\ud800<b>", "text/plain": "\udcff"}, {"a": "\ud800"}),
    ],
    ids=[
        "metadata",
        "types",
        "sizes",
        "values",
        "no dict",
        "nothing",
        "no Unicode",
    ],
)
def test_odd_bundles_are_shown_as_far_as_they_go(data: Any, metadata: Any) -> None:
    folder = Folder((0, 1))
    bundle = json.dumps({"data": data, "metadata": metadata}).encode()
    folder.feed((0, 1), Display(1, "display", bundle), 0.0)
    folder.feed((0, 1), Output(1, "stdout", "behind it\n"), 0.0)
    blocks = folder.take(9.0, everything=True)
    front, text = Recorder(), io.StringIO()
    sink = CellSink(front, has_tabs=True)
    sink.show([*blocks, line(0, text="more")])
    sink.end((0, 1))
    assert len(switches(front)) >= 1
    sink.show([clear(1)])
    json.dumps(front.messages, ensure_ascii=False).encode()
    assert "could not be shown" not in str(front.messages)
    assert front.area[-1] == "[0] behind it\n[0] more\n"
    ConsoleSink(text, text).show(blocks)
    assert text.getvalue().endswith("[0-1] behind it\n")


class Odd(Rich):
    """A bundle that is none."""

    def content(self) -> dict[str, Any]:
        raise ValueError("odd")


def test_unshowable_output_costs_only_itself() -> None:
    blocks = [
        line(0, text="before"),
        Block((0, 1), Odd("display", b""), ("", "")),
        Block((0,), TRACE),
        line(1),
    ]
    front, text = Recorder(), io.StringIO()
    sink = CellSink(front, has_tabs=True)
    sink.show(blocks)
    sink.end((0, 1))
    remark = "[0-1] a display could not be shown: ValueError: odd\n"
    assert front.area[:4] == ["[0] before\n", remark, "[0] ValueError", "[1] text\n"]
    assert len(switches(front)) == 1
    ConsoleSink(text, text).show(blocks)
    assert text.getvalue().startswith(f"[0] before\n{remark}[0] Traceback")


def test_an_error_that_the_front_end_does_not_take_is_named() -> None:
    front = Recorder()

    def publish(kind: str, content: dict[str, Any]) -> None:
        if kind == "error":
            raise OSError("no room")
        front(kind, content)

    CellSink(publish).show([Block((1,), TRACE), line(0)])
    assert front.area == ["[1] ValueError could not be shown: OSError: no room\n", "[0] text\n"]


# ---- a notebook's cell: the switch between ranks


def switches(front: Recorder) -> list[str]:
    return [
        data["text/html"] for data in front.area if isinstance(data, dict) and "text/html" in data
    ]


def differing() -> list[Block]:
    return [line(0, 1, text="same"), line(0, text="zero"), line(1, text="one")]


def test_tabs_appear_at_the_end_and_hold_later_output() -> None:
    front = Recorder()
    sink = CellSink(front, has_tabs=True)
    sink.show(differing())
    assert switches(front) == []
    sink.end((0, 1))
    sink.end((0, 1))
    assert front.kinds == ["stream", "display_data"]
    assert "late" not in switches(front)[0]
    sink.show([line(1, text="late")])
    sink.end((0, 1))
    [switch] = switches(front)
    assert "one\nlate" in switch


@pytest.mark.parametrize("why", ["equal", "not asked for", "turned off", "one rank"])
def test_there_is_no_switch(why: str) -> None:
    front = Recorder()
    displays = Displays(has_tabs=why != "turned off")
    sink = CellSink(front, displays, has_tabs=why != "not asked for")
    sink.show([line(0, 1, text="a"), line(0, 1, text="b")] if why == "equal" else differing())
    sink.end((0,) if why == "one rank" else (0, 1))
    assert switches(front) == []


def test_tabs_hold_the_latest_state_of_a_display() -> None:
    front = Recorder()
    sink = CellSink(front, has_tabs=True)
    sink.show([*differing(), rich(1, ids=("a",), html="<i>first</i>")])
    sink.show([rich(1, kind="update", ids=("a",), html="<i>second</i>")])
    sink.end((0, 1))
    assert "<i>second</i>" in switches(front)[-1]
    assert "<i>first</i>" not in switches(front)[-1]


def test_only_the_newest_cells_are_remembered() -> None:
    displays = Displays()
    front = Recorder()
    first = CellSink(front, displays, has_tabs=True)
    first.show(differing())
    first.end((0, 1))
    shown = len(front.messages)
    for _ in range(20):
        CellSink(Recorder(), displays, has_tabs=True).end((0, 1))
    first.show([line(1, text="late")])
    first.end((0, 1))
    assert front.kinds[shown:] == ["stream"]


# ---- a notebook's cell: what changes in place


def test_unfinished_lines_are_redrawn_in_one_place() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([Live((((0, 1), "10%"),), closed=False)])
    sink.show([line(2)])
    sink.show([Live((((0,), "20%"), ((1,), "30%")), closed=False)])
    assert front.kinds == ["display_data", "stream", "update_display_data"]
    assert front.area == [{"text/plain": "[0] 20%\n[1] 30%"}, "[2] text\n"]


def test_closed_lines_stay_and_the_next_ones_are_new_lines() -> None:
    front = Recorder()
    sink = CellSink(front)
    sink.show([Live((((0,), "100%"),), closed=True), Live((((0,), "1%"),), closed=False)])
    sink.show([Live((((0,), "2%"),), closed=False)])
    assert front.area == [{"text/plain": "[0] 100%"}, {"text/plain": "[0] 2%"}]


def test_the_status_is_one_line_that_changes() -> None:
    front = Recorder()
    sink = CellSink(front)
    for done in range(3):
        sink.status(f"{done} of 3", final=False)
    sink.status("ready", final=True)
    sink.status("another", final=True)
    assert front.area == [{"text/plain": "ready"}, {"text/plain": "another"}]
