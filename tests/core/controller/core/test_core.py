"""The life of a mesh as its controller sees it, what is sent, and questions."""

from __future__ import annotations

import collections
from typing import Any, get_args

import msgspec
import pytest

from cellmesh.controller.core import transitions
from cellmesh.controller.core.core import Answer, Change, Core, Finish
from cellmesh.controller.core.recovery import Recovery
from cellmesh.controller.core.requests import ANSWER_S
from cellmesh.controller.core.runs import Runs
from cellmesh.controller.core.transitions import NUM_KEPT, Transition
from cellmesh.wire.attach import Refused, Welcome
from cellmesh.wire.codec import Parcel, at_rank_for_work
from cellmesh.wire.messages import Channel, Relay, StartFailed, Stopped
from cellmesh.wire.status import HostReport, Probe, RankState, ReadHost
from cellmesh.wire.values import PullNames

from ....support.core_decisions import control_sent, hear, infos, of, ready_core, sent
from ....support.core_script import Script
from ....support.runs import relay

LIFE = {
    "an answer to no run and a second one are dropped": """4 ranks
        run 1 on 0-1; 0 done 99 -> -
        0 done 1 -> -
        0 done 1 -> -
        0-1 done 1 -> finish 1
        1 done 1 -> -""",
    "work for a dead rank ends there, and runs on the others": """4 ranks
        1 dies; drive; run 5 on 0-1 -> run 5 on 0; end 5 on 1: was killed
        run 6 on 1 -> end 6 on 1: was killed; finish 6""",
    "runs between two restarts end": """4 ranks
        restart; restart; @1 mesh ready; run 1 on 0-1 -> run 1 on 0-1
        @2 mesh ready -> end 1 on 0-1: was restarted; finish 1""",
    "work for ranks that a resize has ended ends there": """2 ranks
        run 1 on 1-2 -> end 1 on 1-2 unbegun: cannot be reached: the mesh is smaller; finish 1""",
    "a stop is sent once": """4 ranks
        stop -> stop
        stop -> -
        mesh ready -> -
        run 1 on 0-1 -> end 1 on 0-1 unbegun: cannot be reached: the mesh is stopping; finish 1""",
    "the end ends everything, once": """4 ranks
        run 1 on 0-1; agent ends -> end 1 on 0-1: ended with the mesh (...); finish 1
        until 1000 -> -
        agent ends -> -
        restart -> -
        mesh ready -> -
        run 1 on 0 -> end 1 on 0 unbegun: cannot be reached: the mesh is ended; finish 1""",
    "a mesh that restarts takes no work": """4 ranks
        restart; run 1 on 0 -> end 1 on 0 unbegun: ...the mesh is restarting; finish 1""",
}


@pytest.mark.parametrize("text", LIFE.values(), ids=LIFE)
def test_life(text: str) -> None:
    Script.play(text)


@pytest.mark.parametrize("channel", ["work", "control"])
def test_work_is_sent_as_one_relay(channel: Channel) -> None:
    [effect] = ready_core().submit(relay(7, (0, 2), channel))
    order, frames = effect.parcel
    assert order == Relay((0, 2), channel, 7, 1)
    assert at_rank_for_work().decode(frames) == [Parcel(PullNames(7, "x"))]


@pytest.mark.parametrize("verb", [StartFailed("user", "no such module"), Refused("held by 5")])
def test_failed_start_is_reported_with_its_cause(verb: Any) -> None:
    core = Core(2)
    [change] = core.receive(Parcel(verb), 0.0)
    assert change.cause == verb
    assert change.state != "ready"
    assert core.receive(Parcel(Stopped("so")), 0.0) == [Change("ended", Stopped("so"))]


def test_a_mesh_that_starts_takes_no_work() -> None:
    core = Core(2)
    for state in ("connecting", "starting"):
        assert core.state == state
        deliver, finish = core.submit(relay(1, (0, 1)))
        assert (deliver.ranks, finish) == ((0, 1), Finish(1))
        assert state in deliver.parcel.verb.reason
        core.receive(Parcel(Welcome(1, 2, "host")), 0.0)


def test_a_question_is_answered_by_all_ranks_that_live_and_are_in_time() -> None:
    core = Script.play("4 ranks\n3 dies; drive").core
    first, effects = core.ask((1, 0), Probe, 5.0)
    assert control_sent(effects) == [((0, 1), Probe(first))]
    zero, one = (RankState(first, -1, 0, 0, str(rank), "", "cpu", 0) for rank in (0, 1))
    assert hear(core, (1,), one, 5.1) == []
    assert core.tick(5.0 + ANSWER_S / 2) == []
    second, _ = core.ask((0,), Probe, 5.9)
    assert core.tick(5.0 + ANSWER_S) == [Answer(first, {1: one})]
    assert hear(core, (0,), zero, 6.1) == []
    last = msgspec.structs.replace(zero, request=second)
    assert hear(core, (0,), last, 6.5) == [Answer(second, {0: last})]
    none, effects = core.ask((3,), Probe, 7.0)
    assert effects == [Answer(none, {})]
    assert len({first, second, none}) == 3


def test_questions_to_the_agent_are_answered_by_it_and_by_an_ended_one_with_nothing() -> None:
    core = ready_core()
    request, effects = core.ask_agent(ReadHost)
    assert sent(effects) == [Parcel(ReadHost(request))]
    report = HostReport(request, infos(4))
    assert core.receive(Parcel(report), 0.0) == [Answer(request, report)]
    last, _ = core.ask((0,), Probe, 0.0)
    assert of(Answer, core.agent_ended("stopped")) == [Answer(last, {})]
    request, effects = core.ask_agent(ReadHost)
    assert effects == [Answer(request, None)]


# ---- tables and logs of transitions


TABLES = [(transitions.RECOVERY, "Recovery", Recovery), (transitions.RUN, "Run", Runs)]


@pytest.mark.parametrize(("table", "name", "actor"), TABLES)
def test_a_table_names_each_phase_event_and_action(table: Any, name: str, actor: type) -> None:
    def all_of(kind: str) -> set[str]:
        return set(get_args(getattr(transitions, f"{name}{kind}")))

    assert {state for state, _ in table} == all_of("Phase")
    assert {event for _, event in table} == all_of("Event")
    assert all(callable(getattr(actor, f"_{action}", None)) for _, action in table.values())
    assert {then for then, _ in table.values() if then is not None} <= all_of("Phase")


def test_a_log_keeps_the_last_hundred_and_of_repeated_ones_the_last() -> None:
    log = collections.deque[Transition](maxlen=NUM_KEPT)
    for number in range(2 * NUM_KEPT):
        new = Transition(number, f"run {number // 2}", "running", "stuck", "releasing")
        transitions.add_transition(log, new)
    assert [each.at for each in log] == list(range(1, 2 * NUM_KEPT, 2))
    transitions.add_transition(log, Transition(500.0, "recovery", "calm", "trouble", "examining"))
    assert (len(log), log[0].at) == (NUM_KEPT, 3)
    assert transitions.describe_transitions([*log][-2:], 510.0) == [
        "311.00 s ago  run 99: running -> releasing (stuck)",
        " 10.00 s ago  recovery: calm -> examining (trouble)",
    ]


def test_transitions_of_a_run_that_fails_and_of_its_recovery_are_logged() -> None:
    script = Script.play("2 ranks\nrun 1 on 0-1; @1 0 fail 1; @2.5 tick; 1 fail 1; drive")
    logged: dict[str, list[str]] = {}
    for each in script.core.mesh.transitions:
        logged.setdefault(each.subject, []).append(f"{each.state}: {each.event}")
    assert logged == {
        "run 1": ["running: a rank failed", "failing: time is over", "releasing: ended"],
        "recovery": ["calm: reset", "calm: trouble", "examining: all well"],
    }
