"""The pictures of a profile and of the last cells, as SVG and as text, their tables and timings."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.trace.history import History, TimelineCell
from cellmesh.controller.trace.operations import Operation
from cellmesh.controller.trace.profile import Profile
from cellmesh.magics.render.profiles import (
    describe_timings,
    draw,
    find_straggler,
    show_profile,
)
from cellmesh.magics.render.tables import memory_table
from cellmesh.magics.render.timeline import (
    Row,
    Timeline,
    draw_html,
    draw_svg,
    draw_text,
    timeline_of,
)
from cellmesh.wire.status import MemoryUse, RankInfo, RankState
from cellmesh.wire.trace import MAX_TRACE_BYTES, OperatorTime, Past, RankProfile
from cellmesh.wire.verbs import Timing

MS = 1_000_000
NOTHING = Past((), (), array("i"), b"", 0, 0)


def of_two() -> History:
    """Rank 1 comes 60 ms late to an all_reduce."""
    cell = TimelineCell(1, "In[2]", dict.fromkeys((0, 1), (0, 100 * MS)))
    operations = {
        rank: [
            Operation(
                *("all_reduce", "0", (), start * MS, (90 - start) * MS, 1, 1),
                wait_ns=start * MS,
                waited_ns=(80 - start) * MS,
                last=1,
            )
        ]
        for rank, start in ((0, 20), (1, 80))
    }
    return History((0, 1), (cell,), operations)


def profile_of_two(**changes: Any) -> Profile:
    operators = (
        OperatorTime("aten::mm", "computation", 3, 5 * MS),
        OperatorTime("add", "computation", 1, 9),
    )
    one = RankProfile(past=NOTHING, operators=operators, **changes)
    return Profile(of_two(), {0: one, 1: one})


SVG = "{http://www.w3.org/2000/svg}"


def svg_of(timeline: Timeline) -> tuple[ET.Element, str]:
    page = draw_svg(timeline)
    return ET.fromstring(page), page


def texts_of(root: ET.Element) -> set[str]:
    texts = {text for each in root.iter(f"{SVG}text") for text in each.itertext()}
    return {text.strip() for text in texts}


def page_of(timeline: Timeline) -> ET.Element:
    return ET.fromstring(draw_html(timeline))


def bar(
    name: str, start_ns: int, duration_ns: int, waited_ns: int = 0, members: tuple[int, ...] = ()
) -> Operation:
    return Operation(name, "0", members, start_ns, duration_ns, 0, waited_ns=waited_ns)


def test_timeline_picture_has_a_row_for_each_rank_and_marks_waits() -> None:
    timeline = timeline_of(of_two())
    root, _ = svg_of(timeline)
    texts = texts_of(root)
    titles = [element.attrib["title"] for element in page_of(timeline).iter("area")]
    assert {"rank 0", "rank 1", "0", "100 ms", "compute", "all_reduce"} <= texts
    assert "pale: waits for another rank" in texts
    assert titles == [
        "rank 0: all_reduce, 70 ms, 60 ms of it waiting for rank 1",
        "rank 1: all_reduce, 10 ms",
    ]


@pytest.mark.parametrize(("num_ranks", "num_bars"), [(1, 3000), (64, 300)])
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


def test_of_very_many_ranks_the_first_are_drawn() -> None:
    timeline = timeline_of(history_of(1024))
    assert [row.rank for row in timeline.rows] == [*range(64)]
    told = "%dist_timeline --ranks 64-1023 draws the others"
    assert told in draw_html(timeline)
    assert told in draw_text(timeline)
    some = timeline_of(history_of(64))
    assert some.left_out == ""
    height = float(svg_of(some)[0].attrib["height"])
    assert height < 2.2 * float(svg_of(timeline_of(history_of(16)))[0].attrib["height"])


def test_a_terminal_gets_letters_small_where_a_rank_waits() -> None:
    zero, one, legend = draw_text(timeline_of(of_two())).splitlines()
    assert zero.startswith("rank 0  ")
    assert zero.count("a") == pytest.approx(43, abs=2)
    assert "a" not in one.removeprefix("rank 1")
    assert {"#", "A"} <= set(one)
    assert legend.endswith(
        "0 to 100 ms; # compute, A all_reduce, small letters: waits for another rank"
    )


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


def test_traces_that_are_elsewhere_and_ranks_that_are_missing_are_named() -> None:
    profile = profile_of_two(num_trace_bytes=200_000_000, trace_path="/data/trace.rank0.json")
    profile = Profile(of_two(), profile.by_rank, {2: "it has died", 3: "it has died"})
    shown = show_profile(profile, 1)
    for text in (shown.text, shown.html):
        assert "rank 1 was last in 1 of 1 collectives; the other rank waited 60 of 100 ms" in text
        assert "aten::mm" in text
        assert "and 1 more: --rows 2" in text
        assert "In[2]" in text
    text = shown.text
    assert f"at most {MAX_TRACE_BYTES >> 20} MB a rank" in text
    assert "rank 0's trace of 200 MB" in text
    assert "it is in /data/trace.rank0.json" in text
    assert "nothing of ranks 2-3: it has died" in text
    assert show_profile(Profile(History(), {}, {0: "x"}), 1).text == "nothing of rank 0: x"


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
    return History(tuple(range(num_ranks)), cells, operations)


def test_last_cells_are_drawn_without_the_pauses_between() -> None:
    timeline = timeline_of(history_of(2))
    assert timeline.length_ns == 300 * MS
    assert timeline.marks == [(0, "In[3]"), (200 * MS, "<b>train</b>()")]
    root, picture = svg_of(timeline)
    texts = texts_of(root)
    assert {"rank 0", "rank 1", "straggler", "In[3]", "<b>train</b>()", "compute"} <= texts
    assert "<b>" not in picture
    titles = [element.attrib["title"] for element in page_of(timeline).iter("area")]
    assert titles.count("rank 0: all_reduce, 70 ms, 60 ms of it waiting for rank 1") == 2
    shown = draw(history_of(2), ["trace: <i>t.json</i>"], [])
    assert not [tag for tag in ("<i>", "<b>", "<svg") if tag in shown.html]
    for part in ("rank 1 was last in 2 of 2 collectives", "rank 1", "trace: "):
        assert part in shown.text
        assert part in shown.html
    nothing = draw(History(), ["no cell has run on the ranks yet"], [])
    assert (nothing.text, "img" in nothing.html) == ("no cell has run on the ranks yet", False)


def test_the_straggler_is_the_one_that_waits_least() -> None:
    timings = {0: Timing(0.5, 0.4), 1: Timing(0.5, 0.4), 2: Timing(0.5, 0.001)}
    assert describe_timings(timings).splitlines() == [
        "[0-1] took 500 ms, 400 ms of it in collectives",
        "[2] took 500 ms, 1.0 ms of it in collectives",
        "rank 2 was the straggler: 499 ms outside collectives, the others 100 ms",
    ]


@pytest.mark.parametrize(
    "own",
    [[1.0], [1.0, 1.05], [0.001, 0.004], [0.5, 0.5, 0.5]],
    ids=["alone", "a little", "too short to tell", "equal"],
)
def test_there_may_be_no_straggler(own: list[float]) -> None:
    assert find_straggler({rank: Timing(seconds, 0.0) for rank, seconds in enumerate(own)}) is None
