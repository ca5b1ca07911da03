"""Decisions of an agent about its ranks: no processes, sockets or clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import (
    Died,
    Done,
    MeshReady,
    Progress,
    Ranked,
    RankReady,
    RankUnready,
    Relay,
    Respawned,
    RespawnFailed,
    StartFailed,
    Stopped,
    StoreDied,
)
from cellmesh.wire.verbs import Output, Skipped
from cellmesh.workers.agent.supervisor import (
    KILLED,
    LAST_WORDS_S,
    LEAVE_S,
    MAX_ZYGOTES_LOST,
    RESPAWN_S,
    Action,
    Fork,
    KillRanks,
    Supervisor,
    ToRanks,
)

from ....support.supervisor_decisions import (
    FRAMES,
    LATER,
    READY,
    done,
    make,
    of,
    phases,
    pids,
    started,
    up,
    work,
)

# ---- running


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
    assert work(supervisor, 3, (0, 1)) == [ToRanks((0,), "work", FRAMES)]


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


def test_descriptor_output_of_a_script_is_not_bounded() -> None:
    supervisor = started()
    supervisor.relay(Relay((0,), "work", 1, 1, is_whole=True), (b"",))
    for _ in range(20):
        supervisor.from_pipe(0, "stdout", "line\n" * 10_000, 0.0)
    done(supervisor, 0, 1)
    said = [ranked.verb for ranked in up(supervisor.tick(LATER))]
    assert sum(verb.text.count("\n") for verb in said if isinstance(verb, Output)) == 200_000
    assert not any(isinstance(verb, Skipped) for verb in said)


def test_bytes_of_a_script_that_are_no_text_are_passed_on() -> None:
    supervisor = started()
    supervisor.from_pipe(0, "stdout", "", 0.0, b"\xc3")  # belongs to no run
    supervisor.relay(Relay((0,), "work", 1, 1, is_whole=True), (b"",))
    assert supervisor.runs_script(0)
    supervisor.from_pipe(0, "stdout", "", 0.0, b"\xc3")
    done(supervisor, 0, 1)
    assert not supervisor.runs_script(0)
    said = [ranked.verb for ranked in up(supervisor.tick(LATER))]
    assert said == [Output(1, "stdout", "", b"\xc3"), Done(1)]


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


# ---- starting


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    for num_gpus, remedy in ((0, "Use --backend gloo"), (2, "Start 2 ranks, or use")):
        actions = make(3, backend="nccl").zygote_ready(num_gpus)
        failed, stopped = up(actions)
        assert (failed.fault, type(stopped), of(Fork, actions)) == ("user", Stopped, [])
        assert f"3 ranks, {num_gpus} GPUs" in failed.text
        assert remedy in failed.text
    for backend, num_gpus in (("nccl", 3), ("auto", 0), ("gloo", 0)):
        assert of(Fork, make(3, backend).zygote_ready(num_gpus))


@pytest.mark.parametrize(
    ("event", "fault", "text"),
    [
        (lambda s: s.fail("no module named 'x'\n", "user"), "user", "no module named 'x'"),
        (lambda s: s.zygote_ended("killed", "words\n"), "host", "the zygote killed\nwords"),
        (lambda s: [*s.zygote_ready(0)[:0], *s.fail("no files")], "host", "no files"),
    ],
    ids=["import", "zygote's death", "fork"],
)
def test_a_start_without_ranks_fails_and_ends(
    event: Callable[[Supervisor], list[Action]], fault: Literal["user", "host"], text: str
) -> None:
    supervisor = make()
    assert up(event(supervisor)) == [StartFailed(fault, text), Stopped("the start failed")]
    assert supervisor.state == "ended"


def test_ranks_do_not_meet_those_that_a_killed_zygote_forked_unreported() -> None:
    supervisor = make(2)
    assert of(Fork, supervisor.zygote_ready(0)) == [Fork((0, 1), 1)]
    supervisor.forked({})
    for incarnation in range(2, 2 + MAX_ZYGOTES_LOST):
        assert supervisor.zygote_ended("was killed by SIGKILL", "") == [Fork((0, 1), incarnation)]
    assert of(Fork, supervisor.zygote_ended("was killed by SIGKILL", "")) == []


def test_a_rank_that_cannot_start_ends_the_start_once() -> None:
    supervisor = make(2)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(2))
    actions = supervisor.from_rank(0, Parcel(RankUnready("RuntimeError: no network")), 0.0)
    assert up(actions) == [StartFailed("host", "rank 0 could not start: RuntimeError: no network")]
    assert of(KillRanks, actions) == [KillRanks((0, 1))]
    assert up(supervisor.from_rank(1, Parcel(RankUnready("no")), 0.0)) == []
    assert supervisor.zygote_ended("killed", "") == []


def test_store_death_is_reported_while_ranks_live() -> None:
    assert up(started().store_ended("killed")) == [StoreDied("killed")]
    supervisor = started()
    supervisor.stop("stopped", 0.0)
    assert supervisor.store_ended("killed") == []


# ---- restarting


def test_a_restart_before_torch_is_there_forks_once() -> None:
    supervisor = make(2)
    assert isinstance(supervisor.progress().verb, Progress)
    assert supervisor.restart() == []
    assert len(of(Fork, supervisor.zygote_ready(0))) == 1
    assert started().progress().verb == MeshReady(started().report({}), 0, 1)


# ---- stopping


def test_stubborn_ranks_are_killed_until_they_are_gone() -> None:
    supervisor = started()
    supervisor.stop("stopped", 5.0)
    supervisor.rank_ended(1, "exited with code 0", "", 5.1)
    assert supervisor.deadline() == 5.0 + LEAVE_S
    assert supervisor.tick(5.0) == supervisor.zygote_ready(0) == []
    assert of(KillRanks, supervisor.tick(5.0 + LEAVE_S)) == [KillRanks((0, 2))]
    supervisor.rank_ended(0, "killed", "", 6.1)
    due = supervisor.deadline()
    assert due is not None
    assert of(KillRanks, supervisor.tick(due)) == [KillRanks((2,))]
    assert up(supervisor.rank_ended(2, "killed", "", 9.0)) == [Stopped("stopped")]


def test_last_messages_of_ranks_go_up_before_the_end() -> None:
    supervisor = started(1)
    work(supervisor, 1, (0,))
    supervisor.stop("stopped", 0.0)
    last = Output(1, "stdout", "from an exit handler\n")
    supervisor.from_rank(0, Parcel(last), 0.1)
    said = up(supervisor.rank_ended(0, "exited with code 0", "", 0.1))
    assert said == [Ranked((0,), last), Stopped("stopped")]


# ---- single ranks


def bereft(*dead: int) -> Supervisor:
    """Three ranks, some of which have died and been told of."""
    supervisor = started(3)
    for rank in dead:
        supervisor.rank_ended(rank, "was killed by SIGKILL", "", 0.0)
    supervisor.tick(LATER)
    return supervisor


def reborn(*dead: int) -> Supervisor:
    """As `bereft`, with new processes for them that are not ready yet."""
    supervisor = bereft(*dead)
    supervisor.respawn(dead, 0.0)
    supervisor.forked({rank: 200 + rank for rank in dead})
    return supervisor


def test_dead_ranks_are_forked_and_reported_when_all_are_ready() -> None:
    supervisor = bereft(0, 2)
    assert supervisor.respawn((0, 1, 2), 0.0) == [Fork((0, 2), 1, rejoin=True)]
    assert phases(supervisor) == ["starting", "idle", "starting"]
    assert supervisor.forked({0: 200, 2: 202}) == []
    assert supervisor.from_rank(2, READY, 0.0) == []
    [respawned] = up(supervisor.from_rank(0, READY, 0.0))
    assert isinstance(respawned, Respawned)
    ranks = [(info.rank, info.pid, info.phase, info.ending) for info in respawned.ranks]
    assert ranks == [(0, 200, "idle", ""), (2, 202, "idle", "")]
    assert supervisor.deadline() is None
    work(supervisor, 5, (0, 1, 2))
    assert phases(supervisor) == ["running"] * 3


def test_single_ranks_are_forked_where_they_are_dead_and_the_mesh_is_ready() -> None:
    supervisor = bereft(2)
    [failed] = up(supervisor.respawn((0, 7), 0.0))
    assert failed == RespawnFailed((0, 7), "none of them is dead, or not yet")
    for state, act in (("restarting", supervisor.restart), ("stopping", supervisor.stop)):
        act(*("", 0.0) * (state == "stopping"))
        [failed] = up(supervisor.respawn((2,), 0.0))
        assert failed == RespawnFailed((2,), f"the mesh is {state}")


def test_unreported_death_is_reported_before_the_fork() -> None:
    supervisor = started(2)
    supervisor.rank_ended(1, "was killed by SIGSEGV", "words", 0.0)
    actions = supervisor.respawn((1,), LAST_WORDS_S / 2)
    assert up(actions) == [Died(1, "was killed by SIGSEGV", "words")]
    assert actions[-1] == Fork((1,), 1, rejoin=True)
    supervisor.forked({1: 201})
    supervisor.from_rank(1, READY, 1.0)
    assert up(supervisor.tick(LATER)) == []


def test_a_new_rank_that_ends_before_it_is_ready_takes_the_others_along() -> None:
    supervisor = reborn(0, 2)
    supervisor.from_rank(0, READY, 0.0)
    assert supervisor.rank_ended(2, "exited with code 1", "words", 0.0) == [KillRanks((0,))]
    [failed] = up(supervisor.rank_ended(0, "was killed by SIGKILL", "", 0.0))
    assert failed == RespawnFailed((0, 2), "rank 2 exited with code 1 while it started\nwords")
    assert phases(supervisor) == ["dead", "idle", "dead"]
    assert up(supervisor.tick(LATER)) == [], "they have not been there: their end is no death"
    assert supervisor.state == "ready"
    assert of(Fork, supervisor.respawn((0, 2), 0.0)) == [Fork((0, 2), 1, rejoin=True)]


def test_a_zygote_that_ends_before_it_has_forked_is_replaced_but_not_for_ever() -> None:
    supervisor = bereft(1)
    supervisor.respawn((1,), 0.0)
    for _ in range(MAX_ZYGOTES_LOST):
        assert supervisor.zygote_ended("was killed by SIGKILL", "") == [Fork((1,), 1, rejoin=True)]
    [failed] = up(supervisor.zygote_ended("was killed by SIGKILL", "words"))
    assert failed == RespawnFailed((1,), "the zygote was killed by SIGKILL\nwords")
    assert phases(supervisor) == ["idle", "dead", "idle"]
    assert supervisor.zygote_ready(0) == []


def test_rank_that_hangs_while_it_starts_is_given_up_even_if_it_cannot_be_killed() -> None:
    supervisor = reborn(1)
    assert supervisor.deadline() == RESPAWN_S
    assert supervisor.tick(RESPAWN_S) == [KillRanks((1,))]
    due = supervisor.deadline()
    assert due is not None
    [failed] = up(supervisor.tick(due))
    assert "not ready after 60 s" in failed.text
    assert supervisor.deadline() is None


# ---- kills


def test_a_rank_that_did_not_stop_is_killed_and_its_death_says_so() -> None:
    supervisor = started(3)
    work(supervisor, 1, (0, 1))
    assert supervisor.kill((1, 7)) == [KillRanks((1,))]
    done(supervisor, 0, 1)
    supervisor.rank_ended(1, "was killed by SIGKILL", "words", 0.0)
    assert Died(1, KILLED, "words") in up(supervisor.tick(LATER))
    assert supervisor.kill((1,)) == []


# ---- another number of ranks


def test_ranks_that_leave_are_killed_and_their_end_is_no_death() -> None:
    supervisor = started(3)
    supervisor.rank_ended(2, "was killed", "", 0.0)
    supervisor.tick(LATER)
    assert supervisor.resize(range(1), 0.0) == [KillRanks((1,))]
    assert phases(supervisor) == ["idle"]
    assert supervisor.rank_ended(1, "was killed by SIGKILL", "", 0.0) == []
    assert up(supervisor.tick(LATER)) == []
    assert supervisor.deaths() == []
    assert supervisor.pids() == {0: 100}


def test_restart_waits_for_ranks_that_leave_and_forks_the_others() -> None:
    supervisor = started(3)
    supervisor.resize(range(2), 0.0)
    supervisor.restart()
    for rank in (0, 1):
        assert of(Fork, supervisor.rank_ended(rank, "was killed", "", 0.0)) == []
    assert of(Fork, supervisor.rank_ended(2, "was killed", "", 0.0)) == [Fork((0, 1), 2)]
    supervisor.forked(pids(2, 2))
    supervisor.from_rank(0, READY, 0.0)
    (ready,) = [
        verb for verb in up(supervisor.from_rank(1, READY, 0.0)) if isinstance(verb, MeshReady)
    ]
    assert len(ready.ranks) == 2


def test_new_ranks_beside_nccl_need_gpus_of_their_own() -> None:
    supervisor = make(2, "nccl")
    supervisor.zygote_ready(2)
    supervisor.forked(pids(2))
    for rank in range(2):
        supervisor.from_rank(rank, Parcel(RankReady("cuda", "cpu:gloo,cuda:nccl")), 0.0)
    supervisor.resize(range(3), 0.0)
    (failed,) = up(supervisor.respawn((2,), 0.0))
    assert failed == RespawnFailed((2,), "NCCL needs a GPU for each of 3 ranks, and 2 are here")
