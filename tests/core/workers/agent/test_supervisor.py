"""What an agent decides while ranks run, and when they die: no processes, sockets or clock."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.messages import Died, Done, Ranked, Relay
from cellmesh.wire.status import Probe, RankState
from cellmesh.wire.user_code import Display, Output, Skipped
from cellmesh.workers.agent.supervisor import LAST_WORDS_S, ToRanks

from ....support.supervisor_decisions import FRAMES, LATER, done, phases, started, up, work

# ---- running


def test_control_does_not_make_a_rank_busy() -> None:
    supervisor = started()
    frames = encode([Parcel(Probe(1))])
    assert supervisor.relay(Relay((1,), "control", -1, 1), frames) == [
        ToRanks((1,), "control", frames)
    ]
    assert phases(supervisor) == ["idle"] * 3


def test_a_rank_is_idle_again_when_all_its_runs_are_answered() -> None:
    supervisor = started()
    work(supervisor, 1, (0,))
    work(supervisor, 2, (0,))
    done(supervisor, 0, 1)
    assert phases(supervisor)[0] == "running"
    done(supervisor, 0, 2)
    assert phases(supervisor)[0] == "idle"


def test_work_for_ranks_that_are_not_there_goes_to_none() -> None:
    supervisor = started()
    assert work(supervisor, 1, (3, 99)) == []
    supervisor.rank_ended(1, "killed", "", 0.0)
    assert work(supervisor, 2, (1,)) == []
    assert work(supervisor, 3, (0, 1)) == [ToRanks((0,), "work", FRAMES)]


@pytest.mark.parametrize(
    "verb",
    [
        Output(1, "stdout", "x\n"),
        Skipped(1, 1, 10),
        Display(1, "display", b"{}"),
        RankState(5, 1, 1, 2, "f", "", "cpu", 0),
    ],
)
def test_messages_of_ranks_go_up_within_a_moment(verb: Any) -> None:
    supervisor = started()
    work(supervisor, 1, (0,))
    assert supervisor.from_rank(0, Parcel(verb), 1.0) == []
    due = supervisor.deadline()
    assert due is not None
    assert due < 1.1
    assert up(supervisor.tick(due)) == [Ranked((0,), verb)]


def test_descriptor_output_belongs_to_the_run_in_progress() -> None:
    supervisor = started()
    supervisor.from_pipe(0, "stdout", "early\n", 0.0)
    for run in (4, 5):
        work(supervisor, run, (0,))
    supervisor.from_pipe(0, "stderr", "below Python\n", 0.0)
    done(supervisor, 0, 4)
    supervisor.from_pipe(0, "stdout", "next\n", 0.0)
    done(supervisor, 0, 5)
    supervisor.from_pipe(0, "stdout", "late\n", 0.0)
    outputs = [v.verb for v in up(supervisor.tick(LATER)) if isinstance(v.verb, Output)]
    assert outputs == [
        Output(-1, "stdout", "early\n"),
        Output(4, "stderr", "below Python\n"),
        Output(5, "stdout", "next\n"),
        Output(5, "stdout", "late\n"),
    ]


def test_descriptor_flood_is_bounded_and_reported() -> None:
    supervisor = started()
    work(supervisor, 1, (0,))
    for _ in range(200):
        supervisor.from_pipe(0, "stdout", "line\n" * 10_000, 0.0)
    done(supervisor, 0, 1)
    said = [ranked.verb for ranked in up(supervisor.tick(LATER))]
    shown = sum(len(verb.text) for verb in said if isinstance(verb, Output))
    skipped = sum(verb.num_bytes for verb in said if isinstance(verb, Skipped))
    assert shown + skipped == 200 * 10_000 * len("line\n")
    assert shown < 500_000
    assert said[-1] == Done(1)


# ---- deaths


def test_a_death_goes_up_after_the_ranks_last_words() -> None:
    supervisor = started()
    work(supervisor, 1, (0, 1))
    supervisor.from_rank(1, Parcel(Output(1, "stdout", "goodbye\n")), 5.0)
    assert supervisor.rank_ended(1, "killed by SIGKILL", "goodbye", 5.0) == []
    assert 5.0 < (supervisor.deadline() or 0.0) <= 5.0 + LAST_WORDS_S
    said = up(supervisor.tick(5.0 + LAST_WORDS_S))
    assert said == [
        Ranked((1,), Output(1, "stdout", "goodbye\n")),
        Died(1, "killed by SIGKILL", "goodbye"),
    ]
    assert supervisor.deadline() is None


def test_answers_do_not_wait_for_a_dead_rank() -> None:
    supervisor = started()
    work(supervisor, 1, (0, 1))
    done(supervisor, 0, 1)
    assert supervisor.tick(0.0) == []
    supervisor.rank_ended(1, "killed", "", 0.0)
    assert up(supervisor.tick(0.0)) == [Ranked((0,), Done(1))]


def test_output_hidden_by_the_flood_of_a_dying_rank_is_reported() -> None:
    supervisor = started()
    work(supervisor, 1, (0,))
    for _ in range(20):
        supervisor.from_pipe(0, "stderr", "error\n" * 10_000, 0.0)
    supervisor.rank_ended(0, "killed", "", 0.0)
    said = up(supervisor.tick(LATER))
    assert any(isinstance(v, Ranked) and isinstance(v.verb, Skipped) for v in said)
    assert isinstance(said[-1], Died)


# ---- what there is to see


def test_the_report_has_memory_where_it_is_known() -> None:
    supervisor = started(2)
    assert [info.rss_bytes for info in supervisor.report({101: 5})] == [0, 5]
