"""Folded output in the output area of a notebook's cell."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest

from cellmesh.controller.output.cell import CellSink, Displays, Record
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.fold import AlikeLines, Block, Line, Live, Rich

from ....support.blocks import TRACE, Recorder, clear, line, rich

Blocks = Sequence[Block]


def cell(*shown: Blocks, **options: Any) -> tuple[Recorder, CellSink]:
    """A front end, and the sink of its cell, which has shown these blocks one after the other."""
    front = Recorder()
    sink = CellSink(front, **options)
    for blocks in shown:
        sink.show(blocks)
    return front, sink


def live(*lines: tuple[tuple[int, ...], str], closed: bool = False) -> Block:
    return Block(tuple(rank for ranks, _ in lines for rank in ranks), Live(lines, closed))


def update(*ranks: int, ids: tuple[str, ...], plain: str) -> Block:
    return rich(*ranks, kind="update", ids=ids, plain=plain)


def test_text_of_one_stream_is_one_message() -> None:
    shown = [line(0), rich(0, 1, kind="result", plain="42"), line(2, stream="stderr"), line(3)]
    front, _ = cell(shown)
    assert front.messages == [
        ("stream", {"name": "stdout", "text": "[0] text\n[0-1] 42\n"}),
        ("stream", {"name": "stderr", "text": "[2] text\n"}),
        ("stream", {"name": "stdout", "text": "[3] text\n"}),
    ]


def test_text_displays_and_errors_keep_their_order() -> None:
    front, _ = cell([line(0), rich(0, html="<b>"), Block((0, 1, 3), TRACE), line(2)])
    assert front.kinds == ["stream", "display_data", "display_data", "error", "stream"]
    traceback = ["[0-1,3]", "Traceback (most recent call last)", "  line 1", "ValueError: no"]
    content = {"ename": "[0-1,3] ValueError", "evalue": "no", "traceback": traceback}
    assert front.messages[3] == ("error", content)


@pytest.mark.parametrize(
    "data",
    [{"html": "<b>bold</b>", "plain": "bold"}, {"png": "iVBORw0=\n"}, {"latex": "$x^2$"}],
    ids=["html", "picture", "formula"],
)
def test_a_display_stands_unchanged_below_the_label_of_its_ranks(data: dict[str, str]) -> None:
    block = rich(0, 1, **data, metadata={"application/json": {"expanded": True}})
    front, _ = cell([block])
    [(_, above), (_, content)] = front.messages
    assert above["data"]["text/plain"] == "[0-1]"
    assert "[0-1]</div>" in above["data"]["text/html"]
    assert isinstance(block.item, Rich)
    assert content == block.item.content()


def test_a_display_without_a_common_type_names_its_types() -> None:
    front, _ = cell([rich(0, json={"a": 1})])
    assert front.area[1] == {"application/json": {"a": 1}, "text/plain": "<application/json>"}


@pytest.mark.parametrize(
    ("first", "updates", "texts"),
    [
        (
            [rich(0, ids=("a",), plain="first"), rich(1, ids=("a",), plain="other"), line(0)],
            [update(0, ids=("a",), plain="second")],
            ["[0]", "second", "[1]", "other", "[0] text\n"],
        ),
        (
            [rich(0, 1, ids=("x", "y"), plain="10%")],
            [update(0, ids=("x",), plain="from 0"), update(1, ids=("y",), plain="from rank 1")],
            ["[0-1]", "from 0"],
        ),
        ([], [update(0, ids=("nobody",), plain="x")], []),
    ],
    ids=["by rank and id", "shared: lowest rank", "unknown"],
)
def test_an_update_changes_the_displays_of_its_ranks(
    first: Blocks, updates: Blocks, texts: Sequence[str]
) -> None:
    front, _ = cell(first, *([each] for each in updates))
    shown = [each if isinstance(each, str) else each["text/plain"] for each in front.area]
    assert shown == texts


def test_a_display_is_updated_where_an_earlier_cell_has_shown_it() -> None:
    displays = Displays()
    first, _ = cell([rich(0, ids=("a",), plain="first")], displays=displays)
    updates = [update(0, ids=("a",), plain=f"{at}") for at in range(100)]
    later, _ = cell(updates, displays=displays)
    [(kind, content)] = later.messages  # of a batch, the last one
    assert (kind, content["data"]) == ("update_display_data", {"text/plain": "99"})
    ours = content["transient"]["display_id"]
    assert ours == first.messages[1][1]["transient"]["display_id"]
    # Two cells, or two meshes, may show displays of the same id in one notebook.
    other, _ = cell([rich(0, ids=("a",), plain="first")])
    assert len({"a", ours, other.messages[1][1]["transient"]["display_id"]}) == 3


def test_clearing_empties_the_area() -> None:
    front, sink = cell([line(0)], [clear(0, 1, wait=True)], [line(0, text="new")])
    assert front.messages[1] == ("clear_output", {"wait": True})
    assert front.area == ["[0] new\n"]
    sink.note("remark")
    assert front.messages[-1] == ("stream", {"name": "stderr", "text": "remark\n"})
    sink.show([clear(0)])
    assert front.messages[-1] == ("clear_output", {"wait": False})


def test_a_rank_that_waits_clears_with_its_next_output() -> None:
    front, sink = cell([line(0, 1, text="old"), clear(1, wait=True), line(0, text="more")])
    assert front.area == ["[0-1] old\n[0] more\n"]
    sink.show([line(1, text="new")])
    assert front.area == ["[0] old\n[0] more\n[1] new\n"]


def test_an_error_a_remark_a_status_and_an_unfinished_line_survive_anothers_clearing() -> None:
    front, sink = cell()
    sink.note("remark")
    sink.status("waits", final=False)
    sink.show([Block((0,), TRACE), line(1), live(((0,), "10%"), ((1,), "20%")), clear(1)])
    rest = ["remark\n", "[0] ValueError", {"text/plain": "[0] 10%"}, {"text/plain": "waits"}]
    assert front.area == rest
    sink.show([live(((0,), "30%"))])
    sink.status("", final=True)
    assert front.area[2:] == [{"text/plain": "[0] 30%"}, {"text/plain": ""}]


def test_of_an_animation_in_one_batch_the_last_frame_is_drawn() -> None:
    frames = [[clear(0, wait=True), rich(0, html=f"{at}"), line(1)] for at in range(100)]
    front, _ = cell([block for frame in frames for block in frame])
    assert front.kinds == ["clear_output", "stream", "display_data", "display_data", "stream"]
    assert front.area[2]["text/html"] == "99"
    assert front.area[0].count("[1] text") == 99


def test_dropped_output_is_not_drawn_again_and_a_remark_says_so() -> None:
    front, _ = cell([rich(0, html="A" * 3_000_000), line(1)], [clear(1)], [line(1)])
    remark = "[0] … what was above is gone from here, and its text is in %dist_logs\n"
    assert front.area == [remark, "[1] text\n"]


def recorded(*blocks: Block, **options: Any) -> Record:
    record = Record(**options)
    for key, block in enumerate(blocks):
        record.put(key, block)
        record.trim()
    return record


def texts_of(record: Record, rank: int) -> list[str]:
    return [item.text for item in record.by_rank()[rank] if isinstance(item, Line)]


def test_each_rank_has_what_it_shared_and_what_is_its_own() -> None:
    alike = Block((0, 1), AlikeLines(((0, Line("stdout", "0.1")), (1, Line("stdout", "0.2")))))
    both = live(((0, 1), "10%\n20%"), ((1,), "30%"), closed=True)
    record = recorded(line(0, 1, text="all"), line(1, text="one"), alike, both, line(text="remark"))
    assert record.by_rank().keys() == {0, 1}
    assert texts_of(record, 0) == ["all", "0.1", "10%", "20%"]
    assert texts_of(record, 1) == ["all", "one", "0.2", "10%", "20%", "30%"]


def test_a_flood_is_bounded_and_drops_the_oldest_output() -> None:
    flood = (line(0, text=f"{number}") for number in range(10_000))
    record = recorded(line(1, text="old"), *flood, line(1, text="new"), budget_bytes=10_000)
    assert record.num_bytes <= 20_000
    assert texts_of(record, 0)[-1] == "9999"
    assert texts_of(record, 1) == ["new"]
    assert record.dropped == {0, 1}
    assert record.clear((0,))
    assert record.by_rank().keys() == {1}
    assert not record.clear((0,))


# ---- output that cannot be shown


ODD_BUNDLES: list[tuple[Any, Any]] = [
    ({"text/html": "<b>"}, {"text/html": 3}),
    ({"image/png": "iVBORw0="}, {"image/png": {"width": float("nan"), "height": float("inf")}}),
    ({"image/png": 3, "text/html": None, "text/plain": 5}, {}),
    (5, []),
    ({"text/html": "\ud800<b>", "text/plain": "\udcff"}, {"a": "\ud800"}),
]


@pytest.mark.parametrize(("data", "metadata"), ODD_BUNDLES)
def test_odd_bundles_are_shown_as_far_as_they_go(data: Any, metadata: Any) -> None:
    bundle = json.dumps({"data": data, "metadata": metadata}).encode()
    blocks = [Block((0, 1), Rich("display", bundle), ("", "")), line(0, 1, text="behind it")]
    front, _ = cell([*blocks, line(0, text="more")], has_tabs=True)
    assert front.area[-1] == "[0-1] behind it\n[0] more\n"
    text = io.StringIO()
    ConsoleSink(text, text).show(blocks)
    assert text.getvalue().endswith("[0-1] behind it\n")


class Odd(Rich):
    def content(self) -> dict[str, Any]:
        raise ValueError("odd")


def test_unshowable_output_costs_only_itself() -> None:
    odd = Block((0, 1), Odd("display", b""), ("", ""))
    blocks = [line(0, text="before"), odd, Block((0,), TRACE), line(1)]
    front, sink = cell(blocks, has_tabs=True)
    sink.end((0, 1))
    remark = "[0-1] a display could not be shown: ValueError: odd\n"
    assert front.area[:4] == ["[0] before\n", remark, "[0] ValueError", "[1] text\n"]
    assert len(switches(front)) == 1
    text = io.StringIO()
    ConsoleSink(text, text).show(blocks)
    assert text.getvalue().startswith(f"[0] before\n{remark}[0] Traceback")


DIFFERING = [line(0, 1, text="same"), line(0, text="zero"), line(1, text="one")]


def switches(front: Recorder) -> list[str]:
    return [
        data["text/html"] for data in front.area if isinstance(data, dict) and "text/html" in data
    ]


def test_tabs_appear_at_the_end_and_hold_later_output() -> None:
    displays = Displays()
    front, sink = cell(DIFFERING, displays=displays, has_tabs=True)
    assert switches(front) == []
    sink.end((0, 1))
    sink.end((0, 1))
    assert front.kinds == ["stream", "display_data"]
    assert "late" not in switches(front)[0]
    sink.show([line(1, text="late"), rich(1, ids=("a",), html="<i>first</i>")])
    sink.show([update(1, ids=("a",), plain="second")])
    sink.end((0, 1))
    switch = switches(front)[0]
    assert "one\nlate" in switch
    assert "second" in switch
    assert "first" not in switch
    for _ in range(20):  # newer cells, which are remembered in its place
        CellSink(Recorder(), displays, has_tabs=True).end((0, 1))
    shown = len(front.messages)
    sink.show([line(1, text="too late")])
    sink.end((0, 1))
    assert front.kinds[shown:] == ["stream"]


@pytest.mark.parametrize("why", ["equal", "not asked for", "turned off", "one rank"])
def test_there_is_no_switch(why: str) -> None:
    blocks = [line(0, 1, text="a"), line(0, 1, text="b")] if why == "equal" else DIFFERING
    displays = Displays(has_tabs=why != "turned off")
    front, sink = cell(blocks, displays=displays, has_tabs=why != "not asked for")
    sink.end((0,) if why == "one rank" else (0, 1))
    assert switches(front) == []


def test_unfinished_lines_are_redrawn_in_one_place_until_they_are_closed() -> None:
    front, sink = cell([live(((0, 1), "10%"))], [line(2)], [live(((0,), "20%"), ((1,), "30%"))])
    assert front.kinds == ["display_data", "stream", "update_display_data"]
    assert front.area == [{"text/plain": "[0] 20%\n[1] 30%"}, "[2] text\n"]
    sink.show([live(((0,), "100%"), closed=True), live(((0,), "1%"))])
    sink.show([live(((0,), "2%"))])
    assert front.area[0::2] == [{"text/plain": "[0] 100%"}, {"text/plain": "[0] 2%"}]
