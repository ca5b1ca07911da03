"""Recovery of a mesh: causes, ranks that take part, work that waits, and faults in each phase."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.core import Effect, Note
from cellmesh.controller.core.effects import HealReport, describe_heal
from cellmesh.controller.core.mesh_state import FIRST_HEAL
from cellmesh.controller.core.recovery import ABANDON_S, HEAL_S, MAX_ATTEMPTS, PATIENCE_S
from cellmesh.controller.core.requests import ANSWER_S
from cellmesh.controller.core.runs import STOP_S
from cellmesh.wire.groups import Heal
from cellmesh.wire.messages import Resize
from cellmesh.wire.status import Probe, RankState
from cellmesh.wire.stopping import StepCount, Steps

from ....support.core_decisions import of, sent
from ....support.core_script import Script
from ....support.recovery_scenarios import SCENARIOS, check

# The times of the scenarios.
assert (ANSWER_S, HEAL_S, ABANDON_S, PATIENCE_S, STOP_S) == (1, 60, 5, 5, 2)
assert MAX_ATTEMPTS == 3

HEALING = """
    run 1 on 0-2; 0-2 fail 1; all answer broken -> heal 0-2
"""
RESPAWNING = """
    1 dies; drive; heal -> probe 0,2
    all answer -> respawn 1
"""
DESCRIBING = f"""{RESPAWNING}
    1 respawned -> probe 0-2
    all answer -> describe 0
"""

CASES = {
    "recovers only from: groups that agree after a failure": """2 ranks
        run 1 on 0-1; 0 fail 1 -> -
        1 done 1 -> finish 1; probe 0-1
        all answer #3 -> resume 0
        calm""",
    "recovers only from: broken groups": """2 ranks
        run 1 on 0-1; 0 fail 1; 1 done 1; 0 answers #3 -> -
        1 answers #3 broken -> heal 0-1
        0 done heal -> -
        1 done heal -> note 1: process groups rebuilt...; healed: healed
        calm""",
    "recovers only from: a rank that was interrupted though its code went on": """2 ranks
        run 1 on 0-1; interrupt 1; 0-1 done 1 -> finish 1; probe 0-1
        all answer broken -> heal 0-1""",
    "recovers only from: counts that disagree, before the next run on the members": """3 ranks
        run 1 on 0-2; 0 done 1 #3; 1-2 done 1 #2 -> finish 1
        run 2 on 0-1 -> run 2 on 0-1
        0-1 done 2 -> finish 2
        run 3 on 0-2 -> probe 0-2
        0 answers #3; 1-2 answer #2 -> heal 0-2
        0-2 done heal -> healed: healed; run 3 on 0-2
        0-2 done 3 -> finish 3
        calm""",
    "takes part: a running rank once it is idle": """3 ranks
        run 1 on 2; run 2 on 0-1; 0-1 fail 2; 0-1 answer broken; 2 answers in 1 -> heal 0-1
        0-1 done heal; 2 done 1 -> finish 1; probe 0-2
        all answer -> heal 0-2
        0-2 done heal; calm""",
    "takes part: a holding rank once the failed run has ended": """4 ranks settle_s=60.0
        run 1 on 0-1; run 2 on 0; run 3 on 2-3; 0 fail 1; 2-3 fail 3; 0,2,3 answer broken
        1 answers in 1 -> heal 2-3
        2-3 done heal -> note 3: process groups rebuilt...
        1 done 1; drive; 0 done 2 -> finish 2""",
    "waits: work waits for calm and keeps its order": f"""3 ranks
        {HEALING}
        run 2 on 0-1 -> -
        run 3 on 2 -> -
        0-2 done heal -> note 1: ...; healed: healed; run 2 on 0-1; run 3 on 2""",
    "waits: goes only to the ranks that were there all the time": """3 ranks auto_heal=True
        0 dies; run 1 on 1-2 -> -
        2 dies; drive -> healed: new 0,2, healed; run 1 on 1""",
    "after a death: if all are dead the new ones make the mesh's own groups": """2 ranks
        0 dies; drive; 1 dies; heal -> respawn 0-1
        0-1 respawned -> probe 0-1
        all answer -> heal 0-1""",
    "after a death: a rank killed for not stopping is replaced": """2 ranks
        run 1 on 0-1; interrupt 1; @0.1 interrupt 1; @0.2 0 interrupted 1
        @2 tick -> kill 1; probe 0-1
        all answer in 1; @2.1 1 dies -> finish 1; probe 0
        drive -> note 1: rank 1 is new...; healed: new 1, healed
        calm""",
    "a heal: waits for ranks that are about to be released": """3 ranks
        run 1 on 0-2; 1 dies; @0.1 heal -> -
        @1 tick -> release 0,2 in 1
        @1.1 0 fail 1; 2 fail 1; drive -> ...report new 1, healed...
        calm""",
    "a heal: does not wait without end": """2 ranks
        run 1 on 0-1 cell 3; 1 dies; @0.1 heal -> -
        @0.2 run 2 on 0-1 -> -
        @1 tick -> release 0 in 1
        @6 tick -> probe 0; report failure: ...rank 0 runs cell 3...; run 2 on 0; end 2...
        @9 0 fail 1 -> finish 1; probe 0""",
    "a heal: asks again a rank that is late to answer": """2 ranks
        1 dies; @1 heal -> -
        @2 tick -> probe 0
        drive -> healed: new 1, healed; report new 1, healed""",
    "a heal: can be abandoned while it waits": """2 ranks
        run 1 on 0-1; 1 dies; @0.1 heal -> -
        abandon -> report failure: ...must be idle...
        @1.1 0 fail 1; drive -> ...dead 1""",
    "a heal: waits for a returned rank that leaves an ended run": """2 ranks settle_s=0.0
        host of 1 lost; drive; @1 1 returns -> probe 0-1
        0 answers; 1 answers in 77 -> probe 0-1
        heal -> -
        @20 0 answers; 1 answers in 77 -> probe 0-1
        all answer -> heal 0-1""",
    "while examining: a rank that dies is left out": """3 ranks
        run 1 on 0-2; 0-2 fail 1; 0,2 answer; 1 dies; drive; calm""",
    "while examining: a rank that never answers costs a second": """2 ranks
        run 1 on 0-1; 0-1 fail 1; 0 answers -> -
        @1 tick -> resume 0-1
        calm""",
    "while examining: a rank that has not answered is examined before its next run": """2 ranks
        run 1 on 0-1; 0-1 fail 1; 0 answers -> -
        @1 tick -> resume 0-1
        run 2 on 0 -> run 2 on 0
        0 done 2 -> finish 2
        run 3 on 0-1 -> probe 0-1
        0 answers; 1 answers broken -> heal 0-1
        0-1 done heal -> healed: healed; run 3 on 0-1
        0-1 done 3 -> finish 3
        calm""",
    "a fork: one that fails is reported and costs nothing": f"""3 ranks
        {RESPAWNING}
        run 1 on 0,2 -> -
        1 not respawned: no memory
        drive -> healed: ...; report dead 1, failure: ...no memory; run 1 on 0,2""",
    "a fork: one that is given up may come later": f"""3 ranks
        {RESPAWNING}
        1 not respawned: too slow
        drive -> healed: ...; report dead 1, failure: ...too slow
        calm; @200 1 respawned; drive -> healed: new 1, healed
        calm""",
    "a fork: a rank that dies at each fork is not replaced for ever": """2 ranks auto_heal=True
        1 dies; all answer -> respawn 1
        1 respawned; 1 dies; 0 answers -> respawn 1
        1 respawned; 1 dies; 0 answers -> respawn 1
        1 respawned; 1 dies; 0 answers -> heal 0
        drive; calm""",
    "no description: it is given up and can be tried again": f"""3 ranks
        {DESCRIBING}
        @1 tick; all answer -> describe 2
        @2 tick; all answer -> describe 0
        @3 tick -> ...report new 1, failure: ...did not describe...
        @10 heal; drive -> healed: healed; report healed""",
    "no description: new ranks wait until one can": f"""3 ranks
        {DESCRIBING}
        @1 tick; all answer; @2 tick; all answer; @3 tick; @10 run 1 on 1; run 2 on 0,2
        1 fail 1 -> finish 1; probe 0-2
        1 answers; 0,2 answer in 2 -> resume 1
        0,2 done 2 -> finish 2; probe 0-2
        all answer -> describe 0""",
    "healing fails: on one rank": f"""3 ranks
        {HEALING}
        1 fail heal no -> release 0,2 in heal
        0 released heal -> -
        2 released heal -> probe 0-2
        all answer -> heal 0-2
        0-2 done heal; calm""",
    "healing fails: for good, until the end of the next run": """2 ranks
        run 1 on 0-1; 0-1 fail 1; all answer broken -> heal 0-1
        run 2 on 0; 0-1 fail heal no way -> probe 0-1
        all answer -> heal 0-1
        0-1 fail heal no way -> probe 0-1
        all answer -> heal 0-1
        0-1 fail heal no way -> resume 0-1; note 1: ...no way...%dist_restart...; run 2 on 0
        0 done 2 -> finish 2; probe 0-1
        all answer -> heal 0-1""",
    "healing fails: as it takes too long": """2 ranks
        run 1 on 0-1; 0-1 fail 1; all answer broken; @60 tick -> release 0-1 in heal
        0 released heal -> -
        @65 tick -> resume 0; note 1: ...too long...; healed: ...
        @100 1 released heal -> probe 0-1
        all answer -> heal 0-1
        0-1 done heal; calm""",
    "the store: groups are made over a new one": """2 ranks
        store moves to 4321 -> probe 0-1
        all answer -> heal 0-1 port 4321
        0-1 done heal; calm""",
    "attaching: ranks may hold back": """2 ranks attached
        attached -> probe 0-1
        all answer #2 -> resume 0-1
        calm""",
    "attaching: auto-heal replaces dead ranks": """3 ranks auto_heal=True attached 1 is dead
        attached -> probe 0,2
        all answer #2 -> respawn 1""",
    "attaching: the end of runs in flight": """3 ranks attached run 7 on 0-1
        0-1 answer in 7 #2; 2 answers #2 -> resume 2
        0 fail 7; 1 done 7 -> finish 7; probe 0-2""",
    "attaching: a rank may be about to begin": """3 ranks attached run 7 on 1
        attached -> probe 0-2
        all answer #2 broken -> heal 0,2
        0,2 done heal -> resume 1; healed: healed
        1 done 7 -> finish 7; probe 0-2
        all answer #0 -> heal 0-2""",
    "attaching: a run that is submitted at once waits for broken groups": """2 ranks attached
        attached -> probe 0-1
        run 8 on 0-1 -> -
        all answer #2 broken -> heal 0-1
        0-1 done heal -> healed: healed; run 8 on 0-1
        0-1 done 8 -> finish 8
        calm""",
    "attaching: a run that is submitted and interrupted at once does not begin": """2 ranks attached
        attached -> probe 0-1
        run 8 on 0-1; interrupt 8 -> ...finish 8
        all answer #2 -> resume 0-1
        calm""",
    "attaching: a rank is dead": """3 ranks attached 1 is dead
        attached -> probe 0,2
        all answer #2 -> heal 0,2
        0,2 done heal; 1 dies -> -
        heal; drive -> ...report new 1, healed""",
    "attaching: a rank has no groups": """3 ranks attached
        0 answers #2 broken; 1 answers; 2 answers #2 -> describe 0""",
    "resizing: new ranks are forked, then all make the groups of the new size": """2 ranks
        resize to 4 -> resize; probe 0-1
        all answer -> respawn 2-3
        2-3 respawned -> probe 0-3
        all answer -> heal 0-3 layout 4
        drive -> healed: new 2-3, healed; report new 2-3, healed
        calm""",
    "resizing: ranks that stay make those of a smaller size": """4 ranks
        resize to 2+1 -> resize; probe 0-2
        all answer -> heal 0-2 layout 2+1
        drive -> healed: healed; report healed
        calm""",
    "resizing: new ranks that cannot start leave a mesh that a heal completes": """2 ranks
        resize to 3; all answer -> respawn 2
        2 not respawned: no memory; drive -> ...report healed, dead 2, failure: ...no memory
        heal; all answer -> respawn 2""",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_recovery(text: str) -> None:
    Script.play(text)


def test_what_a_heal_tells_ranks_and_the_user() -> None:
    script = Script(3, new_generation=lambda: 42, dims={"dp": 3})
    script.run(f"{DESCRIBING}\n0 describes")
    run, ranks = FIRST_HEAL + 42, (0, 1, 2)
    assert script.asked[Heal] == (ranks, Heal(run, 42, ranks, b"groups", ("dp",), (3,)))
    script.run("@0.5 0-2 done heal gradients are dropped -> ...dropped; report new 1, healed, ...")
    report = HealReport((1,), True, notes=("gradients are dropped",))
    assert describe_heal(report).endswith("; gradients are dropped")


@pytest.mark.parametrize(
    ("num_ranks", "report", "end"),
    [
        (3, {"respawned": (1,)}, "held (`%dist_heal --from 0` copies from a rank)"),
        (3, {"respawned": (0, 1)}, "held (`%dist_heal --from 2` copies from a rank)"),
        (2, {"respawned": (0, 1)}, "ranks 0-1 are new and empty, process groups rebuilt in 0.0 s"),
        (2, {"dead": (1,)}, "`%dist_heal` replaces it; the others hold what they held"),
        (1, {"dead": (0,)}, "rank 0 is dead: `%dist_heal` replaces it"),
    ],
)
def test_what_is_left_on_other_ranks_is_named_where_there_are_any(
    num_ranks: int, report: dict[str, Any], end: str
) -> None:
    text = describe_heal(HealReport(healed=True, num_ranks=num_ranks, **report))
    assert text.endswith(end)


def test_steps_of_an_earlier_run_are_not_compared() -> None:
    script = Script.play("2 ranks\nrun 1 on 0-1; 0 fail 1; 1 done 1 -> finish 1; probe 0-1")
    request = script.asked[Probe][1].request
    for rank, (run, number) in enumerate(((1, 3), (0, 5))):
        made = Steps(run, (StepCount("Adam 1", number),))
        script.hear((rank,), RankState(request, -1, 0, 0, "", "", "cpu", 0, steps=made))
    assert of(Note, script.effects) == []


def test_what_a_resize_tells_the_agent() -> None:
    script = Script(4)
    _, effects = script.core.resize((2, 1), {"dp": 3}, 0.0)
    assert sent(effects)[0].verb == Resize(1, (2, 1), ("dp",), (3,))
    assert [info.rank for info in script.core.mesh.ranks] == [0, 1, 2]


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        ("run 1 on 0-1", "ranks 0-1 must be idle"),
        ("1 dies", "rank 1 must live for that: `%dist_heal`, then resize"),
        ("heal", "being healed"),
        ("stop", "the mesh is stopping"),
    ],
)
def test_why_a_mesh_is_not_resized(begin: str, why: str) -> None:
    assert why in Script.play(f"2 ranks\n{begin}").core.why_not_resize(3)


UNDER_WAY = {
    "examining": "1 dies\ndrive\nheal",
    "respawning": RESPAWNING,
    "describing": DESCRIBING,
    "healing": f"{DESCRIBING}\n0 describes",
}
ENDS = {
    "a restart": "restart -> report failure: the mesh was restarted; ...finish 1; restart",
    "a stop": "stop -> report failure: the mesh was stopped; stop\nagent ends -> ...finish 1",
    "the agent's end": "agent ends -> report failure: the mesh ended with the mesh...finish 1",
}


@pytest.mark.parametrize("when", UNDER_WAY)
@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_all_ranks_ends_a_recovery(when: str, how: str) -> None:
    script = Script(3)
    script.run(f"{UNDER_WAY[when]}\nrun 1 on 0,2 -> -\n{ENDS[how]}\ndrive -> -")


class Alone(Script):
    """A core whose ranks and agent a scenario drives."""

    def __init__(self, num_ranks: int, options: dict[str, bool]) -> None:
        self.seen: list[Effect] = []
        super().__init__(num_ranks, **options)

    def decide(self, effects: list[Effect]) -> None:
        self.seen += effects
        super().decide(effects)


@pytest.mark.parametrize("text", SCENARIOS.values(), ids=SCENARIOS)
def test_recovery_as_both_sides_have_it(text: str) -> None:
    check(Alone, text)
