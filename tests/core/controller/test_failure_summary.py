"""What became of a run, and what its ranks are doing, in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.failure_summary import (
    describe_live,
    exception_of,
    explain_waits,
    summarize,
)
from cellmesh.controller.status import activity_of, show_stacks, stacks_of
from cellmesh.errors import Released
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import GroupCount, InFlight
from cellmesh.wire.messages import ENDED_BY_GLOO, Died, Done, Failed
from cellmesh.wire.status import RankInfo, RankState, StackText, WaitingCall


def failed(
    type_name: str = "ValueError", text: str = "boom", line: int = 4, **fields: Any
) -> Failed:
    return Failed(1, type_name, text, "", line, **fields)


def released(
    collective: str, line: int = 5, waited_s: float = 1.0, text: str = "", inner: str = ""
) -> Failed:
    text = text or f"waited in {collective}"
    fields = {"collective": collective, "waited_s": waited_s, "inner": inner}
    return failed("Released", text, line, released=True, **fields)


def summary(outcomes: dict[int, Any]) -> str:
    parcels = {rank: Parcel(verb) for rank, verb in outcomes.items()}
    ended = {rank: exception_of(rank, p) for rank, p in parcels.items() if type(p.verb) is not Done}
    return summarize(ended, parcels)


BOOM = "rank 0 raised ValueError: boom (line 4)"


SUMMARIES: list[tuple[dict[int, Any], str]] = [
    (
        {3: failed(), **{rank: released("all_reduce") for rank in (0, 1, 2, 4)}},
        "rank 3 raised ValueError: boom (line 4); ranks 0-2,4 waited in all_reduce at line 5 "
        "for 1.0 s and were released",
    ),
    (
        {0: failed("ProcessRaisedException", "\n\n-- Process 1:\n"), 1: failed("E", " \n")},
        "rank 0 raised ProcessRaisedException: -- Process 1: (line 4); rank 1 raised E (line 4)",
    ),
    (
        {rank: Died(rank, "was on b, which is lost", "") for rank in (2, 3)} | {0: Done(1)},
        "ranks 2-3 were on b, which is lost; rank 0 finished",
    ),
    (
        {0: failed(), 1: released("", 2, 0.0, "ran time.sleep"), 2: Done(1)},
        f"{BOOM}; rank 1 ran time.sleep at line 2 and was released; rank 2 finished",
    ),
    (
        {0: failed(), 1: released("barrier", text="waited in barrier, while x: 1\n2")},
        f"{BOOM}; rank 1 waited in barrier, while x: 1 at line 5 for 1.0 s and was released",
    ),
    (  # lines of another cell
        {0: failed(inner="In[8] line 10"), 1: released("barrier", inner="In[8] line 12")},
        "rank 0 raised ValueError: boom (In[8] line 10, called at line 4); rank 1 waited in "
        "barrier at In[8] line 12, called at line 5, for 1.0 s and was released",
    ),
    (  # a call
        {0: failed(line=0, inner="In[8] line 10"), 1: released("", 0, 0.0, "ran the cell")},
        "rank 0 raised ValueError: boom (In[8] line 10); rank 1 ran and was released",
    ),
    (
        {0: released("recv", 3), 1: released("barrier", 9), 2: failed("BdbQuit", "", 7)},
        "rank 2 left the debugger (line 7); rank 0 waited in recv at line 3 for 1.0 s and was "
        "released; rank 1 waited in barrier at line 9 for 1.0 s and was released",
    ),
    (
        {0: failed()} | {rank: released("send", waited_s=0.4 * rank) for rank in (2, 3)},
        f"{BOOM}; ranks 2-3 waited in send at line 5 for 1.2 s and were released",
    ),
]


@pytest.mark.parametrize(("outcomes", "words"), SUMMARIES)
def test_summary_of_an_ended_run(outcomes: dict[int, Any], words: str) -> None:
    assert summary(outcomes) == words


def state(
    line: int = 5, where: str = "", collective: str = "", run: int = 7, **facts: Any
) -> RankState:
    return RankState(1, run, 3, line, where, collective, "cpu", 0, **facts)


IN_BARRIER = {rank: state(collective="barrier", waited_s=3 + 6 * rank) for rank in (0, 1)}
FROM_CELL = state(collective="barrier", inner="In[8] line 12"), state(0, "f", inner="In[8] line 9")
LIVE: list[tuple[dict[int, RankState], str]] = [
    (
        {rank: state(collective="all_reduce", waited_s=12.2) for rank in (0, 1, 2, 4, 5, 7)}
        | {3: state(2, "time.sleep")},
        "ranks 0-2,4-5,7 in all_reduce at line 5 for 12 s; rank 3 running time.sleep at line 2; "
        "rank 6 without an answer",
    ),
    ({0: state(), 1: state()}, "ranks 0-1 running at line 5"),
    ({0: state(0), 1: state(0, "f")}, "rank 0 running; rank 1 running f"),
    (
        {0: state(asks=True), 1: state(collective="recv")},
        "rank 0 asking you at line 5; rank 1 in recv at line 5",
    ),
    (
        {0: state(run=6), 1: state(run=-1)},
        "rank 1 idle; rank 0 still in an earlier run",
    ),
    (
        dict(enumerate(FROM_CELL)),
        "rank 0 in barrier at In[8] line 12, called at line 5; rank 1 running f at In[8] line 9",
    ),
    (IN_BARRIER, "ranks 0-1 in barrier at line 5 for 9 s"),
]


@pytest.mark.parametrize(("states", "words"), LIVE)
def test_the_live_line(states: dict[int, RankState], words: str) -> None:
    assert describe_live(7, range(max(states) + 1), states) == words


def test_an_abort_by_gloo_names_the_operation_that_the_others_are_in() -> None:
    aborted = Died(0, f"was killed by SIGABRT: {ENDED_BY_GLOO}, as sizes differ", "")

    def others(*begun: str) -> str:
        verbs = [msgspec.structs.replace(released("all_reduce"), begun=one) for one in begun]
        return summary({0: aborted, **dict(enumerate(verbs, 1)), 4: Done(1)})

    start = "rank 0 was killed by SIGABRT: gloo ended it"
    assert others("a", "a").startswith(f"{start} in a, as sizes differ; ")
    assert others("a", "b").startswith(f"{start} in a or b, as sizes differ; ")
    assert others("a", "b", "c").startswith(f"{start}, as sizes differ; ")
    assert others("", "").startswith(f"{start}, as sizes differ; ")


# ---- many ranks


def test_summary_of_many_different_failures_is_short() -> None:
    errors = {rank: failed(text=f"{rank} " + "x" * 500) for rank in range(0, 1024, 2)}
    waiting = {rank: released("all_reduce", rank) for rank in range(1, 1024, 2)}
    words = summary(errors | waiting)
    assert len(words) <= 2000
    assert words.startswith("rank 0 raised ValueError: 0 xxx")
    assert "510 ranks (4,6,8,…) failed in other ways; " in words
    assert "ranks (" in words.rpartition("; ")[2]


def test_ranks_that_fail_alike_are_all_told_in_a_few_words() -> None:
    words = summary({rank: failed() for rank in range(0, 1024, 2)})
    assert words == "512 ranks (0,2,4,…) raised ValueError: boom (line 4)"


@pytest.mark.parametrize("num_ranks", [8, 1024])
def test_the_live_line_is_short(num_ranks: int) -> None:
    states = {rank: state(where=f"f{rank}") for rank in range(1, num_ranks)}
    states[0] = state(collective="all_reduce")
    words = describe_live(7, range(num_ranks), states)
    assert words.startswith("rank 0 in all_reduce")
    assert words.endswith(" at other places" if num_ranks > 8 else "f7 at line 5")
    assert len(words) <= 700


# ---- %dist_why


def in_operation(number: int, run: int = 7, name: str = "all_reduce", began: int = 0) -> RankState:
    counts = (GroupCount("0", (), began or number, description="mesh_dp"),)
    flight = (InFlight("0", name, number),) if name else ()
    facts = {"group": "0", "waited_s": 5.0 if name else 0.0, "counts": counts, "in_flight": flight}
    return RankState(1, run, 1, 3, "time.sleep(9)", name, "cpu", 0, **facts)  # type: ignore[arg-type]


WAITS = "ranks 0-1 wait in the 3rd operation on dp (all_reduce), "
COMPUTES, ENDED = (in_operation(0, run, "", 2) for run in (7, -1))
SERVES = msgspec.structs.replace(ENDED, waiting=(WaitingCall(3, "serve"),))


THIRD: list[tuple[RankState | None, tuple[int, ...], str]] = [
    (COMPUTES, (), f"{WAITS}which rank 2 has not begun; rank 2 is running time.sleep(9) at line 3"),
    (ENDED, (), f"{WAITS}which rank 2 has ended without; rank 2 is idle"),
    (SERVES, (), f"{WAITS}which rank 2 has not begun; rank 2 is idle"),
    (None, (), f"{WAITS}which rank 2 has not begun; rank 2 does not answer"),
    (
        in_operation(0, 7, "", 3),
        (),
        f"{WAITS}which all have begun; rank 2 is running time.sleep(9) at line 3",
    ),
    (None, (2,), f"these cannot meet: {WAITS}which rank 2 has died without"),
]


@pytest.mark.parametrize(("third", "dead", "words"), THIRD)
def test_why_ranks_wait(third: RankState | None, dead: Any, words: str) -> None:
    states = {0: in_operation(3), 1: in_operation(3)} | ({2: third} if third else {})
    assert explain_waits(states, dead, 3) == words
    assert explain_waits({0: ENDED}, (), 1) == "no rank waits for another"


def test_why_a_rank_waits_for_another_mesh() -> None:
    link = {
        "group": "link 'w'",
        "waited_s": 5.0,
        "in_flight": (InFlight("link 'w'", "broadcast", 1),),
    }
    waiting = RankState(1, 7, 1, 3, "f", "broadcast on the link 'w'", "cpu", 0, **link)
    words = "rank 0 waits in broadcast on the link 'w'; rank 1 is idle"
    assert explain_waits({0: waiting, 1: ENDED}, (), 2) == words


def test_a_verdict_stands_before_what_ranks_were_doing() -> None:
    why = "these cannot meet: why"
    waited = Failed(1, "Released", "waited in all_reduce", "", 3, released=True)
    outcomes = {0: Parcel(waited), 1: Parcel(Done(1))}
    assert summarize({0: Released("x")}, outcomes, why) == (
        f"{why}; rank 0 waited in all_reduce at line 3 and was released; rank 1 finished"
    )
    outcomes[1] = Parcel(Failed(1, "ValueError", "no", "", 2))
    text = summarize({0: Released("x"), 1: ValueError("no")}, outcomes, why)
    assert text.startswith("rank 1 raised ValueError")


# ---- %dist_status and stacks


@pytest.mark.parametrize(
    ("changes", "answer", "activity"),
    [
        ({}, state(run=-1), "idle"),
        ({"predecessor_ending": "was killed by SIGKILL"}, state(run=-1), "new"),
        ({"predecessor_ending": "was killed by SIGKILL"}, state(), "runs"),
        ({"phase": "running"}, state(), "runs"),
        ({"phase": "running"}, state(collective="all_reduce"), "waits"),
        ({"phase": "running"}, state(collective="all_reduce", asks=True), "asks"),
        ({"phase": "running"}, state(collective="barrier", run=FIRST_HEAL + 1), "heals"),
        ({"phase": "running"}, None, "silent"),
        ({"phase": "starting"}, None, "starts"),
        ({"phase": "dead", "pid": 0, "ending": "exited with code 3"}, None, "dead"),
    ],
)
def test_activity_is_one_word(changes: Any, answer: RankState | None, activity: str) -> None:
    info = msgspec.structs.replace(RankInfo(0, 100, "node", "idle"), **changes)
    assert activity_of(info, answer) == activity


def test_equal_stacks_are_shown_once_and_ranks_without_one_are_named() -> None:
    answers = {0: StackText(1, "at a\n"), 1: StackText(1, "at a\n")}
    session: Any = SimpleNamespace(dead_ranks={3, 9}, ask=lambda question: answers)
    assert show_stacks(stacks_of(session, (0, 1, 2, 3))).split("\n\n") == [
        "ranks 0-1:\nat a",
        "rank 2:\n  did not answer: it is stopped, or too busy to",
        "rank 3:\n  dead",
    ]
