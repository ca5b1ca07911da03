"""Runs in flight: ranks that are released or killed, and views of runs that take long."""

from __future__ import annotations

import itertools

import pytest

from cellmesh.controller.core.core import Deliver
from cellmesh.controller.core.runs import ESCALATE_S, STOP_S
from cellmesh.controller.core.sweeps import SWEEP_S, WATCH_AFTER_S
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Died

from ....support.core_decisions import of
from ....support.core_script import Script, describe

# The times of the scenarios.
assert (ESCALATE_S, STOP_S, SWEEP_S, WATCH_AFTER_S) == (5, 2, 0.5, 5)

CASES = {
    "release: the others when they have had time to settle": """4 ranks settle_s=2.0
        @10 run 1 on 0-3; @11 3 fail 1; @12.5 0 fail 1; @12.9 2 done 1; releases until 12.9 -> -
        releases until 13 -> release 1 in 1
        releases until 30 -> -""",
    "release: as a rank died": """4 ranks
        @10 run 1 on 0-1; 0 dies; releases until 10.9 -> -
        releases until 11 -> release 1 in 1""",
    "release: they have time once a rank raises, and more while it is described": """4 ranks
        @10 run 1 on 0-2; @11 0,2 raising 1 -> -
        @11.5 2 fail 1; releases until 11.9 -> -
        releases until 12 -> release 1 in 1
        releases until 30 -> -
        @40 0-1 fail 1 -> finish 1...
        0 raising 1 -> -""",
    "release: none while a rank asks": """4 ranks
        run 1 on 0-2; @0.5 1 asks in 1; @1 0 fail 1; releases until 20 -> -
        reply to 1: q -> reply to 1: q
        releases until 25 -> release 1-2 in 1""",
    "release: once the question is withdrawn": """4 ranks
        run 1 on 0-1; 1 asks in 1; 0 fail 1; @3 1 asks no more in 1
        releases until 9 -> release 1 in 1
        reply to 1: late -> -""",
    "release: an interrupted rank may end as its code decides": """4 ranks
        run 1 on 0-1; interrupt 1; @0.1 0 interrupted 1; releases until 20 -> -""",
    "release: no control thread": """2 ranks
        run 1 on 0-1 control; 0 fail 1; until 20 -> -""",
    "release: a run that has waited for calm has its time from then on": """3 ranks
        run 1 on 0-1; 0-1 fail 1; @0.1 run 2 on 0-2; @0.2 2 dies; @5 drive -> ...run 2 on 0-1
        releases until 6 -> -
        releases until 6.2 -> release 0-1 in 2""",
    "waiting: a rank that ended well is waited for": """2 ranks
        run 1 on 0-1; @0.1 1 done 1 #2; probes until 1 -> -
        sweep -> probe 0-1
        1 answers #2; 0 answers in 1 #3 waits all_reduce -> judge 1: ...; release 0 in 1""",
    "waiting: a state that is older than the rank's end": """3 ranks
        run 1 on 0-2; @0.1 2 done 1 #3; sweep; 2 answers #3; 1 answers in 1 #2; 1 done 1 #3
        0 answers in 1 #3 waits all_reduce -> -""",
    "waiting: a rank with more work may join": """2 ranks
        run 1 on 0-1; run 2 on 0-1; @0.1 1 done 1; sweep; 1 answers #2
        0 answers in 1 #3 waits all_reduce -> -""",
    "waiting: an idle rank with other work may join": """3 ranks
        run 1 on 0-1; run 2 on 2; wait for 1; sweep -> probe 0-2
        2 answers in 2 #0; 0 answers in 1 #1 waits all_reduce
        1 answers in 1 #1 waits all_reduce -> -""",
    "waiting: a rank that holds back its work will not": """3 ranks
        run 1 on 0-2; run 2 on 0-1; interrupt 1; @0.1 1 fail 1; sweep
        1 answers #2; 2 answers in 1 #2
        0 answers in 1 #3 waits all_reduce -> judge 1: ...; release 0 in 1""",
    "waiting: one that has not begun the run will": """4 ranks
        run 1 on 0-1; run 2 on 0,2; wait for 2; 0 fail 1; 1 asks in 1; sweep
        0 answers #0; 1 answers #0; 3 answers #0 -> -
        2 answers in 2 #1 of 0,2 waits all_reduce -> -""",
    "waiting: an awaited rank needs idle ranks": """3 ranks
        run 1 on 0-1; wait for 1; sweep -> probe 0-2
        2 answers #0; 0 answers in 1 #1 waits all_reduce
        1 answers in 1 #1 waits all_reduce -> judge 1: ...; release 0-1 in 1""",
    "waiting: operations that cannot meet": """2 ranks
        run 1 on 0-1; probes until 0.9 -> -
        sweep -> probe 0-1
        0 answers in 1 cannot all_reduce -> -
        1 answers in 1 cannot barrier -> judge 1: these cannot meet: ...; release 0-1 in 1""",
    "waiting: not while one asks": """3 ranks
        run 1 on 0-2; sweep; 2 asks in 1; 2 answers in 1 #0; 0 answers in 1 cannot all_reduce
        1 answers in 1 cannot barrier -> -""",
    "waiting: no rank is looked at, as a later run may join": """3 ranks
        run 1 on 0-1; until 4.9 -> -""",
    "waiting: a rank without an answer is missing in the status line": """2 ranks settle_s=5.0
        run 1 on 0-1; sweep; 0 answers in 1; @6.5 tick -> watch 1: 0""",
    "interrupt: a second one kills ranks that have not stopped": """4 ranks
        run 1 on 0-2; @10 interrupt 1; 0-2 quiet in 1 -> interrupt 0-2 in 1 aligned
        @10.2 interrupt 1 -> -
        @10.5 0 interrupted 1; kills until 11.9 -> -
        kills until 12 -> kill 1-2""",
    "interrupt: a late second one is a first one": """4 ranks
        run 1 on 0; @10 interrupt 1; 0 quiet in 1; @15.1 interrupt 1 -> interrupt 0 in 1
        kills until 18 -> -""",
    "interrupt: a rank with the run queued is not killed": """4 ranks
        run 1 on 0; run 2 on 0-1; @10 interrupt 2; @10.1 interrupt 2; kills until 12 -> kill 1""",
    "interrupt: a run that waits for calm ends at once": """2 ranks
        run 1 on 0-1; 0-1 fail 1; run 2 on 0-1 -> -
        interrupt 2 -> end 2 on 0-1 unbegun: KeyboardInterrupt; finish 2""",
    "interrupt: or where it is held back": """2 ranks settle_s=60.0
        run 1 on 0-1; run 2 on 0; 0 fail 1
        interrupt 2 -> interrupt 0 in 2; end 2 on 0 unbegun: KeyboardInterrupt; finish 2; ...""",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_runs(text: str) -> None:
    Script.play(text)


def test_lost_host_ends_the_runs_of_its_ranks_at_once_and_is_one_event() -> None:
    script = Script.play("4 ranks\n@10 run 1 on 0-3; run 2 on 2-3; host of 2-3 lost")
    lost = [each for each in describe(script.effects) if each.startswith("end")]
    why = "was on b, which is lost: killed"
    assert lost == [f"end 1 on 2-3: {why}", f"end 2 on 2-3 unbegun: {why}"]
    assert script.core.dead.keys() == {2, 3} == {each.rank for each in script.core.dead.values()}


def test_a_death_ends_the_ranks_part_in_every_run() -> None:
    script = Script.play("4 ranks\nrun 1 on 0-1; run 2 on 1; run 3 on 0; 1 dies -> finish 2; ...")
    died = Died(1, "was killed", "")
    first, second = Deliver(1, (1,), Parcel(died)), Deliver(2, (1,), Parcel(died), False)
    assert of(Deliver, script.effects) == [first, second]
    assert script.core.dead == {1: died}


def test_core_has_no_deadline_where_nothing_settles() -> None:
    script = Script.play("4 ranks settle_s=0.0\nrun 1 on 0-1; 1 asks in 1; 0 fail 1; tick")
    assert (script.core.deadline() or 0.0) >= SWEEP_S


def test_a_run_that_takes_long_is_shown_every_second() -> None:
    script, times = Script.play("2 ranks\nrun 1 on 0-1"), []
    while script.now < 8.5:
        script.run("sweep\nall answer in 1")
        times += [script.now] * ("watch 1: 0-1" in describe(script.effects))
    assert times[0] == pytest.approx(WATCH_AFTER_S, abs=SWEEP_S)
    assert len(times) == 5
    assert all(b - a == pytest.approx(1.0, abs=SWEEP_S) for a, b in itertools.pairwise(times))
