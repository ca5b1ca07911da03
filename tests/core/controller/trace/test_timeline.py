"""Ranks' pasts as one history on one clock: who waited for whom, what is a part of what, and what
is not known.
"""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.core.clocks import ClockOffset
from cellmesh.controller.trace.chrome import trace_of
from cellmesh.controller.trace.history import History, merge
from cellmesh.controller.trace.profile import profile_of
from cellmesh.wire.inspect import Refusal
from cellmesh.wire.trace import RECORD, CellSpan, Past, RankProfile, What

MS, S = 1_000_000, 10**9
NAN = math.nan
ALL = What("all_reduce", "0", (), 0)


def cell(run: int, begin_ms: float, end_ms: float | None, name: str = "") -> CellSpan:
    count = 0 if name else run
    return CellSpan(run, name, count, begin_ms / 1e3, None if end_ms is None else end_ms / 1e3)


def told(cells: list[CellSpan], operations: list[tuple[Any, ...]], **fields: Any) -> Past:
    """A rank's past; operations: what, sequence, run, begin, end, and peer and wait if wanted."""
    whole = [(*one, -1, one[3])[:7] if len(one) == 5 else (*one, one[3])[:7] for one in operations]
    whats = tuple(dict.fromkeys(what for what, *_ in whole))
    numbers = b"".join(
        RECORD.pack(sequence, peer, run, begin / 1e3, end / 1e3, wait / 1e3)
        for _, sequence, run, begin, end, peer, wait in whole
    )
    left_out, now_s = fields.get("num_left_out", 0), fields.get("now_ms", 1000) / 1e3
    what = array("i", [whats.index(one) for one, *_ in whole])
    return Past(tuple(cells), whats, what, numbers, left_out, now_s)


def history_of(*pasts: Past) -> History:
    """Of the first ranks' last five cells."""
    return merge(dict(enumerate(pasts)), {}, 5)


def waits_ms(history: History, rank: int) -> list[float]:
    return [one.waited_ns // MS for one in history.operations[rank]]


def one_late() -> History:
    """Rank 1 of three comes 300 ms late to an all_reduce."""
    begins = (0, 300, 4)
    return history_of(*(told([cell(4, 0, 320)], [(ALL, 1, 4, at, 310)]) for at in begins))


# ---- who waited for whom


def test_early_ranks_wait_for_the_last() -> None:
    history = one_late()
    assert [waits_ms(history, rank) for rank in range(3)] == [[300], [0], [296]]
    assert {ours[0].last for ours in history.operations.values()} == {1}
    late = history.lateness()[1]
    assert (late.num_last, late.awaited_s) == (1, pytest.approx(0.596))
    assert history.straggler == 1
    assert history.describe() == (
        "rank 1 was last in 1 of 1 collectives; each other rank waited 298 of 320 ms for it"
    )
    [cell] = history.cells
    times = [tuple(ns / MS for ns in history.times(rank, cell)) for rank in range(3)]
    assert times == [(10, 310, 300), (310, 10, 0), (14, 306, 296)]


def test_groups_and_generations_are_kept_apart() -> None:
    near, far = What("all_reduce", "1", (0, 1), 0), What("all_reduce", "2", (2, 3), 0)
    healed = What("all_reduce", "0", (), 7)
    cells = [cell(1, 0, 600)]
    history = history_of(
        told(cells, [(ALL, 1, 1, 0, 9), (near, 1, 1, 10, 50), (healed, 1, 1, 60, 61)]),
        told(cells, [(ALL, 1, 1, 5, 9), (near, 1, 1, 40, 50), (healed, 1, 1, 60, 61)]),
        told(cells, [(ALL, 1, 1, 8, 9), (healed, 1, 1, 60, 61), (far, 1, 1, 500, 550)]),
        told(cells, [(ALL, 1, 1, 8, 9), (healed, 1, 1, 60, 61), (far, 1, 1, 505, 550)]),
    )
    assert [waits_ms(history, rank) for rank in (0, 2)] == [[8, 30, 0], [0, 0, 5]]
    assert [one.last for one in history.operations[0]] == [2, 1, 0]


def test_operation_that_a_rank_has_not_begun_has_no_known_wait() -> None:
    cells = [cell(1, 0, None)]
    history = history_of(
        told(cells, [(ALL, 1, 1, 0, NAN)]),
        told(cells, []),
        told(cells, [(ALL, 1, 1, 10, NAN)]),
    )
    assert [waits_ms(history, rank) for rank in range(3)] == [[0], [], [0]]
    (one,) = history.operations[0]
    assert (one.is_open, one.duration_ns) == (True, S)
    assert (history.straggler, history.describe()) == (None, "")
    abandoned = history_of(told([cell(1, 0, 50)], [(ALL, 1, 1, 10, NAN)])).operations[0][0]
    assert (abandoned.is_open, abandoned.end_ns) == (False, 50 * MS)


def test_message_waits_for_its_peer_and_makes_no_straggler() -> None:
    send, receive = What("send", "0", (), 0), What("recv", "0", (), 0)
    cells = [cell(1, 0, 100)]
    history = history_of(
        told(cells, [(send, 1, 1, 80, 90, 1), (send, 1, 1, 81, 90, 2)]),
        told(cells, [(receive, 1, 1, 10, 90, 0)]),
        told(cells, [(receive, 1, 1, 85, 90, 0)]),
    )
    assert (waits_ms(history, 0), waits_ms(history, 1)) == ([0, 4], [70])
    assert [one.last for one in history.operations[1]] == [0]
    assert (history.straggler, history.describe()) == (None, "")


def test_launches_on_gpus_are_not_taken_for_waits() -> None:
    launched = What("all_reduce", "0", (), 0, is_launch=True)
    operations = [(launched, 1, 1, 10 * rank, 10 * rank + 1) for rank in range(2)]
    history = history_of(*[told([cell(1, 0, 50)], [one]) for one in operations])
    assert waits_ms(history, 0) == [0]
    assert history.notes[0].startswith("collectives on GPUs are shown where they were launched")


def test_while_the_main_thread_does_not_wait_it_computes() -> None:
    operations = [(10, 60, -1, 40), (70, 80, -1, NAN), (85, 90, -1, 95)]
    numbered = [(ALL, number, 1, *times) for number, times in enumerate(operations, 1)]
    history = history_of(told([cell(1, 0, 100)], numbered))
    assert history.computing(0, history.cells[0]) == [(0, 40 * MS), (60 * MS, 100 * MS)]
    assert not history.computing(3, history.cells[0])


_SPANS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), max_size=12)


@given(st.lists(_SPANS, min_size=1, max_size=4))
def test_waits_are_never_longer_than_their_operation(spans: list[list[tuple[int, int]]]) -> None:
    operations = [
        [(ALL, i, 1, start, start + took) for i, (start, took) in enumerate(sorted(ours), 1)]
        for ours in spans
    ]
    history = history_of(*(told([cell(1, 0, 200)], ours) for ours in operations))
    for rank, ours in history.operations.items():
        assert all(0 <= one.waited_ns <= one.duration_ns for one in ours)
        times = history.times(rank, history.cells[0])
        assert times.waiting_ns <= times.collectives_ns <= 200 * MS


# ---- what is drawn, and what is not known


def test_the_last_cells_of_all_ranks_count_and_calls_have_their_names() -> None:
    first, call = cell(1, 0, 10), cell(3, 30, 40, "step")
    pasts = {
        0: told([first, call], [(ALL, 1, 1, 1, 2), (ALL, 2, 3, 31, 32)]),
        1: told([first, cell(2, 20, 25)], [(ALL, 1, 1, 1, 2)]),
    }
    history = merge(pasts, {}, 2)
    assert [one.title for one in history.cells] == ["In[2]", "step()"]
    assert [one.run for one in history.operations[0]] == [3]
    assert list(history.operations[1]) == []
    assert history.cells[1].by_rank.keys() == {0}


def test_pauses_between_cells_are_not_drawn() -> None:
    cells = [cell(1, 0, 100), cell(2, 60_100, 60_200), cell(3, 60_201, 60_300)]
    history = history_of(told(cells, []))
    assert history.length_ns == pytest.approx(306 * MS, abs=MS)
    shifts = [one.shift_ns for one in history.cells]
    assert shifts == pytest.approx([0, 59_994 * MS, 59_994 * MS], abs=MS)


def test_waits_for_unrecorded_collectives_are_unknown() -> None:
    cells, whole = [cell(1, 0, 50)], [(ALL, 1, 1, 10, 20), (ALL, 2, 1, 30, 40)]
    history = history_of(told(cells, whole), told(cells, [(ALL, 2, 1, 35, 40)], num_left_out=1))
    assert [one.last for one in history.operations[0]] == [-1, 1]
    assert history.notes == (
        "1 older operations of these cells are not shown: ranks keep their last ones",
    )


def test_dead_and_new_ranks_are_listed() -> None:
    pasts = {0: told([cell(1, 0, 50)], [(ALL, 1, 1, 10, 20)]), 1: told([], [])}
    died = Refusal("RankDied", "was killed by SIGKILL")
    history = merge(pasts, {2: died, 3: died}, 5)
    assert history.notes == (
        "nothing of ranks 2-3: was killed by SIGKILL; what it did is gone with it",
    )
    assert history.operations[0][0].last == -1


def test_no_cell_has_run() -> None:
    history = history_of(told([], []), told([], []))
    assert history.notes == ("no cell has run on the ranks yet",)
    assert (history.length_ns, history.describe()) == (0, "")
    assert json.loads(trace_of(history))["traceEvents"]


def test_a_trace_has_a_process_a_rank_with_cells_computing_and_waits() -> None:
    trace = json.loads(trace_of(one_late()))
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    begins = [e for e in events if e["pid"] == 0 and e["ph"] == "b"]
    ends = {(e["cat"], e["id"]): e["ts"] for e in events if e["ph"] == "e"}
    assert [(e["name"], e["ts"], ends[e["cat"], e["id"]]) for e in begins] == [
        ("In[4]", 0.0, 320_000.0),
        ("compute", 310_000.0, 320_000.0),
        ("all_reduce", 0.0, 310_000.0),
        ("waits for rank 1", 0.0, 300_000.0),
    ]
    said = {"cell": "In[4]", "group": "0", "ranks": "all", "waited_us": 300_000.0}
    assert begins[2]["args"] == said


# ---- hosts whose clocks differ

AHEAD_S = 182_034.25
NEAR, FAR = ClockOffset("a", 0.0, 1e-4), ClockOffset("b", AHEAD_S, 2e-4)


def on_clock(ahead_s: float, begin_s: float) -> Past:
    """A cell from 10 to 13 and an all_reduce that goes on, on a clock that is ahead."""
    ahead_ms, begin_ms = ahead_s * 1e3, begin_s * 1e3
    cells = [cell(run, ahead_ms + a, ahead_ms + b) for run, a, b in ((1, 2e3, 3e3), (2, 1e4, 13e3))]
    whole = [(ALL, 1, 2, begin_ms + ahead_ms, NAN)]
    return told(cells, whole, now_ms=ahead_ms + 2e4)


def test_late_rank_of_another_host_is_late_by_our_clock() -> None:
    """Without the offset, its cell would be two days after those of the others."""
    pasts = {0: on_clock(0, 10.5), 1: on_clock(0, 10.5), 2: on_clock(AHEAD_S, 12)}
    history = merge(pasts, {}, 1, {0: NEAR, 1: NEAR, 2: FAR})
    assert history.cells[0].by_rank == dict.fromkeys(range(3), (0, 3 * S))
    [theirs] = history.operations[2]
    assert (theirs.start_ns, theirs.wait_ns, theirs.end_ns) == (2 * S, 2 * S, 3 * S)
    assert history.lateness()[2].awaited_s == 3.0
    assert history.notes == (
        "clocks of hosts, against the notebook's: a: +0.0000 s ± 0.1 ms, b: +182,034.2500 s ± 0.2 "
        "ms",
    )


def test_a_profiled_gpus_work_is_on_our_clock() -> None:
    theirs = RankProfile(past=on_clock(AHEAD_S, 12), busy=((AHEAD_S + 11, AHEAD_S + 11.5),))
    history = profile_of({0: RankProfile(past=on_clock(0, 11)), 1: theirs}, {}, {1: FAR}).history
    assert history.computing(1, history.cells[0]) == [(S, 3 * S // 2)]
    assert history.computing(0, history.cells[0]) == [(0, S)]
