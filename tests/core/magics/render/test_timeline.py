"""The pictures of a profile and of the last cells, as SVG and as text, and their tables."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.trace.history import History, TimelineCell
from cellmesh.controller.trace.operations import Operation
from cellmesh.controller.trace.profile import MAX_TRACE_BYTES, Profile
from cellmesh.magics.render.history import cell_table, rank_table, static_of
from cellmesh.magics.render.profiles import ProfileView
from cellmesh.magics.render.tables import format_time, memory_table
from cellmesh.magics.render.timeline import (
    Row,
    Timeline,
    draw_text,
    timeline_of,
    timeline_of_history,
)
from cellmesh.magics.render.timeline_svg import draw_html, draw_svg, ticks
from cellmesh.wire.status import MemoryUse, RankInfo, RankState
from cellmesh.wire.trace import Collective, OperatorTime, RankProfile

from ....support.step_counter import growth

MS = 1_000_000


def profile_of_two(**changes: Any) -> Profile:
    """Rank 1 comes 60 ms late to an all_reduce."""
    base = 10**18
    operators = (
        OperatorTime("aten::mm", "computation", 3, 5 * MS),
        OperatorTime("add", "computation", 1, 9),
    )
    return Profile(
        {
            rank: RankProfile(
                start_ns=base,
                end_ns=base + 100 * MS,
                operators=operators,
                collectives=(
                    Collective("all_reduce", base + start * MS, (90 - start) * MS, (), "0"),
                ),
                num_collectives=1,
                busy=((base + 2 * MS, (start - 4) * MS),),
                **changes,
            )
            for rank, start in ((0, 20), (1, 80))
        }
    )


SVG = "{http://www.w3.org/2000/svg}"


def svg_of(timeline: Timeline) -> tuple[ET.Element, str]:
    page = draw_svg(timeline)
    return ET.fromstring(page), page


def page_of(timeline: Timeline) -> ET.Element:
    return ET.fromstring(draw_html(timeline))


def bar(
    name: str, start_ns: int, duration_ns: int, waited_ns: int = 0, members: tuple[int, ...] = ()
) -> Operation:
    return Operation(name, "0", members, start_ns, duration_ns, 0, waited_ns=waited_ns)


def test_timeline_picture_has_a_row_for_each_rank_and_marks_waits() -> None:
    timeline = timeline_of(profile_of_two())
    root, _ = svg_of(timeline)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    titles = [element.attrib["title"] for element in page_of(timeline).iter("area")]
    assert {"rank 0", "rank 1", "0", "100 ms", "all_reduce", "pale: waits for another rank"} <= set(
        texts
    )
    assert titles == [
        "rank 0: all_reduce, 70 ms, 60 ms of it waiting for rank 1",
        "rank 1: all_reduce, 10 ms",
    ]


def test_a_page_that_removes_inline_svg_shows_the_picture() -> None:
    timeline = timeline_of(profile_of_two())
    page = page_of(timeline)
    (image,) = page.iter("img")
    (areas,) = page.iter("map")
    kind, encoded = image.attrib["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(encoded).decode() == draw_svg(timeline)
    assert image.attrib["alt"]
    assert "currentColor" not in draw_svg(timeline), "the picture has all its colours"
    assert image.attrib["usemap"] == f"#{areas.attrib['name']}"
    assert "<svg" not in ProfileView(profile_of_two())._repr_html_()


@pytest.mark.parametrize(("num_ranks", "num_bars"), [(1, 3000), (8, 400), (64, 60), (64, 300)])
def test_a_picture_in_the_notebooks_file_is_small(num_ranks: int, num_bars: int) -> None:
    names = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
    rows = []
    for rank in range(num_ranks):
        bars = [
            bar(names[(at * 7) % 4], at * MS, MS // 2 + 1000 * (at * rank % 97), MS // 4, (0, 1))
            for at in range(num_bars)
        ]
        rows.append(Row(rank, [(at * MS, at * MS + MS // 3) for at in range(num_bars)], bars))
    page = draw_html(Timeline(rows, num_bars * MS))
    assert len(page) <= 60_000


def test_of_very_many_ranks_those_are_drawn_that_differ() -> None:
    timeline = timeline_of_history(history_of(1024))
    assert len(timeline.rows) == 16
    assert timeline.rows[-1].rank == 1023
    told = "16 of 1024 ranks are drawn: those that differ most from the others"
    assert told in draw_html(timeline)
    assert told in draw_text(timeline)
    assert not timeline_of_history(history_of(64)).num_left_out


def test_the_work_of_a_picture_grows_with_the_number_of_ranks() -> None:
    def work(num_ranks: int) -> Any:
        history = history_of(num_ranks)
        return lambda: (static_of(history, []), cell_table(history))

    assert growth(work, 16) < 6


def test_a_long_legend_has_more_lines() -> None:
    bars = [bar(f"collective_number_{number}", number, 1) for number in range(12)]
    root, _ = svg_of(Timeline([Row(0, [], bars)], 12))
    entries = [e for e in root.iter(f"{SVG}text") if (e.text or "").startswith("collective")]
    assert len({entry.attrib["y"] for entry in entries}) == 3
    assert all(float(entry.attrib["x"]) < 800 for entry in entries)


def test_names_are_escaped() -> None:
    timeline = Timeline([Row(0, [], [bar('<b>&"', 0, 5)])], 10)
    _, page = svg_of(timeline)
    assert "<b>" not in page
    assert [area.attrib["title"] for area in page_of(timeline).iter("area")] == [
        'rank 0: <b>&", 5 ns'
    ]


def test_a_terminal_gets_letters_small_where_a_rank_waits() -> None:
    zero, one, legend = draw_text(timeline_of(profile_of_two())).splitlines()
    assert zero.startswith("rank 0  ")
    assert zero.count("a") == pytest.approx(43, abs=2)
    assert "a" not in one.removeprefix("rank 1")
    assert {"#", "A"} <= set(one)
    assert legend.endswith(
        "0 to 100 ms; # operators, A all_reduce, small letters: waits for another rank"
    )


def test_empty_timeline_draws_nothing() -> None:
    svg_of(timeline_of(Profile({})))
    assert draw_text(timeline_of(Profile({}))).strip() == "0 to 1 ns; # operators"


_TIMES = st.integers(0, 10**10)


@given(
    busy=st.lists(st.tuples(_TIMES, _TIMES), max_size=5),
    bars=st.lists(st.builds(bar, st.sampled_from(["a", "b&"]), _TIMES, _TIMES, _TIMES), max_size=5),
    length=st.integers(1, 10**10),
)
def test_any_timeline_can_be_drawn(
    busy: list[tuple[int, int]], bars: list[Operation], length: int
) -> None:
    timeline = Timeline([Row(0, busy, bars)], length)
    svg_of(timeline)
    page_of(timeline)
    assert len(draw_text(timeline).splitlines()) == 2


@given(length=st.integers(1, 10**13))
def test_ticks_are_few_and_inside(length: int) -> None:
    found = ticks(length)
    assert found[0] == 0
    assert found[-1] <= length
    assert 2 <= len(found) <= 7


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0"), (12, "12 ns"), (1500, "1.5 µs"), (20 * MS, "20 ms"), (2_500 * MS, "2.5 s")],
)
def test_times_are_written_with_their_unit(ns: int, text: str) -> None:
    assert format_time(ns) == text


def test_a_profile_shows_tables_and_the_straggler() -> None:
    view = ProfileView(profile_of_two(), 1)
    for text in (repr(view), view._repr_html_()):
        assert (
            "rank 1 was last in 1 of 1 collectives; the other rank waited 60 of 100 ms for it"
            in text
        )
        assert "aten::mm" in text
        assert "and 1 more: --rows 2" in text
        assert "of it waiting" in text


def test_traces_that_are_elsewhere_and_ranks_that_are_missing_are_named() -> None:
    profile = profile_of_two(num_trace_bytes=200_000_000, trace_path="/data/trace.rank0.json")
    text = Profile(profile.by_rank, {2: "it has died", 3: "it has died"}).describe_trace()
    assert f"at most {MAX_TRACE_BYTES >> 20} MB a rank" in text
    assert "rank 0's trace of 200 MB" in text
    assert "it is in /data/trace.rank0.json" in text
    assert "nothing of ranks 2-3: it has died" in text
    assert "nothing of rank 0: x" in repr(ProfileView(Profile({}, {0: "x"})))


def test_a_trace_below_where_the_notebook_runs_is_named_from_there() -> None:
    traces = {"trace.json": Path.cwd() / "trace.json", "/data/trace.json": Path("/data/trace.json")}
    for name, path in traces.items():
        profile = Profile(profile_of_two().by_rank, {}, num_trace_bytes=2_900_000, trace_path=path)
        assert f"trace: {name} (2.9 MB)" in repr(ProfileView(profile))


# ---- memory


def memory_state(rank: int, run: int, **fields: int) -> RankState:
    return RankState(1, run, 7 if run >= 0 else 0, 0, "", "", "cpu", 0, memory=MemoryUse(**fields))


def test_memory_table_shows_the_change_of_the_last_cell() -> None:
    infos = [RankInfo(rank, 10 + rank, "node", "idle", "cpu") for rank in range(3)]
    infos.append(RankInfo(3, 0, "node", "dead", ending="was killed by SIGKILL"))
    states = {
        0: memory_state(
            0, -1, rss=300_000_000, peak_rss=400_000_000, cell_rss=-2_000_000, execution_count=6
        ),
        1: memory_state(
            1, 5, rss=1, peak_rss=1, cell_rss=5, cell_peak_rss=8_000, execution_count=7
        ),
    }
    table = memory_table("", infos, states)
    assert [list(row) for row in table.rows] == [
        ["0", "In[6]", "300.0 MB", "400.0 MB", "-2.0 MB", ""],
        ["1", "In[7] (runs)", "1 B", "1 B", "+5 B", "8 kB"],
        ["2", "does not answer", "", "", "", ""],
        ["3", "dead: was killed by SIGKILL", "", "", "", ""],
    ]


def test_gpus_have_columns_of_their_own() -> None:
    states = {
        0: memory_state(0, -1, allocated=5_000_000, peak_allocated=6_000_000, reserved=8_000_000)
    }
    table = memory_table("", [RankInfo(0, 10, "node", "idle", "cuda:0")], states)
    assert list(table.rows[0])[-4:] == ["5.0 MB", "6.0 MB", "8.0 MB", "+0 B"]
    assert list(table.headers)[-4:] == ["GPU allocated", "GPU peak", "GPU reserved", "last cell"]


# ---- the last cells


def history_of(num_ranks: int) -> History:
    """Two cells; the last rank comes late to an all_reduce in each."""
    cells = tuple(
        TimelineCell(
            run, title, dict.fromkeys(range(num_ranks), (at, at + 100 * MS)), shift_ns=shift
        )
        for run, title, at, shift in ((1, "In[3]", 0, 0), (2, "<b>train</b>()", 900 * MS, 700 * MS))
    )
    late = num_ranks - 1

    def operation(rank: int, run: int, cell_ns: int) -> Operation:
        start = 80 if rank == late else 20
        at = cell_ns + start * MS
        waits = {"wait_ns": at, "waited_ns": (80 - start) * MS, "last": late}
        return Operation("all_reduce", "0", (), at, (90 - start) * MS, run, run, **waits)

    operations = {
        rank: [operation(rank, 1, 0), operation(rank, 2, 900 * MS)] for rank in range(num_ranks)
    }
    matches = [(dict.fromkeys(range(num_ranks), index), set[int]()) for index in range(2)]
    return History(tuple(range(num_ranks)), cells, operations, matches)


def test_last_cells_are_drawn_without_the_pauses_between() -> None:
    timeline = timeline_of_history(history_of(2))
    assert timeline.length_ns == 300 * MS
    assert timeline.marks == [(0, "In[3]"), (200 * MS, "<b>train</b>()")]
    root, picture = svg_of(timeline)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "straggler", "In[3]", "<b>train</b>()", "compute"} <= set(texts)
    assert "<b>" not in picture
    titles = [element.attrib["title"] for element in page_of(timeline).iter("area")]
    assert titles.count("rank 0: all_reduce, 70 ms, 60 ms of it waiting for rank 1") == 2


def test_many_ranks_have_lower_rows() -> None:
    heights = {
        num: float(svg_of(timeline_of_history(history_of(num)))[0].attrib["height"])
        for num in (16, 64)
    }
    assert heights[64] < 2.2 * heights[16]


def test_timeline_without_a_widget_is_a_picture_and_text() -> None:
    shown = static_of(history_of(2), ["trace: <i>t.json</i>"])
    assert "<i>" not in shown.html
    assert "<b>" not in shown.html
    assert "<svg" not in shown.html
    for part in ("rank 1 was last in 2 of 2 collectives", "rank 1, waited for 60 ms", "trace: "):
        assert part in shown.text
        assert part in shown.html
    nothing = static_of(History(notes=("no cell has run on the ranks yet",)), [])
    assert nothing.text == "no cell has run on the ranks yet"
    assert "img" not in nothing.html


def test_profile_tables_show_where_time_went() -> None:
    history = history_of(2)
    rows = [list(row) for row in cell_table(history).rows]
    assert rows[0] == ["In[3]", "100 ms", "60 ms", "40 ms", "30 ms", "rank 1, waited for 60 ms"]
    assert [list(row) for row in rank_table(history).rows] == [
        ["0", "60 ms", "140 ms", "120 ms", "0 of 2", "0"],
        ["1", "180 ms", "20 ms", "0", "2 of 2", "120 ms"],
    ]
