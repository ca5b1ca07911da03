"""What an agent decides: the life of a mesh, told what happened. No processes, sockets or clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.framing import Parcel, encode
from cellmesh.wire.messages import (
    Died,
    Display,
    Done,
    Failed,
    MeshReady,
    Output,
    Probe,
    Progress,
    PullNames,
    Ranked,
    RankReady,
    RankState,
    RankUnready,
    Relay,
    Skipped,
    StartFailed,
    Stopped,
    StoreDied,
)
from cellmesh.workers.supervisor import (
    LAST_WORDS_S,
    LEAVE_S,
    Action,
    AskToLeave,
    End,
    ForkAll,
    KillRanks,
    Supervisor,
    ToRanks,
    Up,
)

FRAMES = encode([Parcel(PullNames(1, "x"))])
READY = Parcel(RankReady("cpu", "gloo"))
LATER = 1e6


def make(num_ranks: int = 3, backend: str = "gloo") -> Supervisor:
    return Supervisor(num_ranks, backend, "host", 0.0)


def pids(num_ranks: int, incarnation: int = 1) -> dict[int, int]:
    return {rank: 100 * incarnation + rank for rank in range(num_ranks)}


def started(num_ranks: int = 3) -> Supervisor:
    supervisor = make(num_ranks)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(num_ranks))
    for rank in range(num_ranks):
        supervisor.from_rank(rank, READY, 0.0)
    assert supervisor.state == "ready"
    return supervisor


def of(kind: type, actions: Iterable[Action]) -> list[Any]:
    return [action for action in actions if type(action) is kind]


def up(actions: Iterable[Action]) -> list[Any]:
    """The verbs that go to the controller."""
    return [parcel.verb for action in of(Up, actions) for parcel in action.parcels]


def work(supervisor: Supervisor, run: int, ranks: Sequence[int]) -> list[Action]:
    return supervisor.relay(Relay(tuple(ranks), "work", run, len(FRAMES)), FRAMES)


def done(supervisor: Supervisor, rank: int, run: int, now: float = 0.0) -> list[Action]:
    return supervisor.from_rank(rank, Parcel(Done(run)), now)


def phases(supervisor: Supervisor) -> list[str]:
    return [info.phase for info in supervisor.report({})]


# ---- starting


def test_a_mesh_starts_by_forking_all_ranks_once_torch_is_there() -> None:
    supervisor = make()
    assert supervisor.state == "starting"
    assert supervisor.deadline() is None
    actions = supervisor.zygote_ready(0)
    assert up(actions) == [Progress("forking ranks", 0)]
    assert of(ForkAll, actions) == [ForkAll(1)]
    assert supervisor.forked(pids(3)) == []
    assert supervisor.pids() == {0: 100, 1: 101, 2: 102}
    assert phases(supervisor) == ["starting"] * 3


def test_a_mesh_is_ready_when_every_rank_has_answered() -> None:
    supervisor = make()
    supervisor.zygote_ready(0)
    supervisor.forked(pids(3))
    assert up(supervisor.from_rank(2, READY, 0.0)) == [Progress("process group", 1)]
    assert up(supervisor.from_rank(0, READY, 0.0)) == [Progress("process group", 2)]
    assert supervisor.state == "starting"
    progress, ready = up(supervisor.from_rank(1, READY, 0.0))
    assert progress == Progress("process group", 3)
    assert isinstance(ready, MeshReady)
    assert supervisor.state == "ready"
    assert [(info.rank, info.pid, info.host, info.phase) for info in ready.ranks] == [
        (rank, 100 + rank, "host", "idle") for rank in range(3)
    ]
    assert {(info.device, info.backend) for info in ready.ranks} == {("cpu", "gloo")}


def test_who_comes_later_is_told_how_far_it_is() -> None:
    assert isinstance(make().progress().verb, Progress)
    supervisor = started()
    assert supervisor.progress().verb == MeshReady(supervisor.report({}))


@pytest.mark.parametrize(
    ("num_gpus", "remedy"), [(0, "Use --backend gloo"), (2, "Start 2 ranks, or use --backend gloo")]
)
def test_nccl_needs_a_gpu_for_each_rank(num_gpus: int, remedy: str) -> None:
    supervisor = make(3, backend="nccl")
    actions = supervisor.zygote_ready(num_gpus)
    failed, stopped = up(actions)
    assert failed.fault == "user"
    assert f"3 ranks, {num_gpus} GPUs" in failed.text
    assert remedy in failed.text
    assert isinstance(stopped, Stopped)
    assert of(End, actions)
    assert not of(ForkAll, actions)


@pytest.mark.parametrize(("backend", "num_gpus"), [("nccl", 3), ("nccl", 8), ("auto", 0), ("gloo", 0)])
def test_what_can_work_is_started(backend: str, num_gpus: int) -> None:
    assert of(ForkAll, make(3, backend).zygote_ready(num_gpus))


def test_a_module_that_cannot_be_imported_is_the_users_fault() -> None:
    supervisor = make()
    actions = supervisor.zygote_failed("no module named 'x'\n")
    assert up(actions) == [StartFailed("user", "no module named 'x'"), Stopped("the start failed")]
    assert of(End, actions)
    assert supervisor.state == "ended"


def test_a_zygote_that_dies_is_the_hosts_fault() -> None:
    actions = make().zygote_ended("killed by SIGKILL", "last words\n")
    failed, _ = up(actions)
    assert failed == StartFailed("host", "the zygote killed by SIGKILL\nlast words")
    assert of(End, actions)


def test_ranks_that_cannot_be_forked_are_the_hosts_fault() -> None:
    supervisor = make()
    supervisor.zygote_ready(0)
    actions = supervisor.fork_failed("too many open files")
    assert up(actions) == [StartFailed("host", "too many open files"), Stopped("the start failed")]
    assert of(End, actions)


def test_a_rank_that_dies_while_it_starts_ends_the_start() -> None:
    supervisor = make()
    supervisor.zygote_ready(0)
    supervisor.forked(pids(3))
    actions = supervisor.rank_ended(1, "exited with code 1", "last words", 0.0)
    assert up(actions) == [StartFailed("host", "rank 1 exited with code 1 while it started\nlast words")]
    assert of(KillRanks, actions) == [KillRanks((0, 2))]
    assert supervisor.state == "stopping"
    assert supervisor.rank_ended(0, "killed", "", 0.0) == []
    actions = supervisor.rank_ended(2, "killed", "", 0.0)
    assert up(actions) == [Stopped("the start failed")]
    assert of(End, actions)


def test_a_rank_that_cannot_start_ends_the_start() -> None:
    supervisor = make(2)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(2))
    actions = supervisor.from_rank(0, Parcel(RankUnready("RuntimeError: no network")), 0.0)
    assert up(actions) == [StartFailed("host", "rank 0 could not start: RuntimeError: no network")]
    assert of(KillRanks, actions) == [KillRanks((0, 1))]


def test_a_start_fails_once() -> None:
    supervisor = make(2)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(2))
    supervisor.from_rank(0, Parcel(RankUnready("no")), 0.0)
    assert up(supervisor.from_rank(1, Parcel(RankUnready("no")), 0.0)) == []
    assert supervisor.zygote_ended("killed", "") == []


def test_ranks_forked_too_late_are_killed() -> None:
    supervisor = make(2)
    supervisor.zygote_ready(0)
    supervisor.stop("stopped", 0.0)
    assert of(KillRanks, supervisor.forked(pids(2))) == [KillRanks((0, 1))]


def test_a_zygote_that_is_ready_too_late_forks_nothing() -> None:
    supervisor = make(2)
    supervisor.stop("stopped", 0.0)
    assert supervisor.zygote_ready(0) == []


def test_a_store_that_dies_is_told_while_it_matters() -> None:
    assert up(started().store_ended("killed")) == [StoreDied("killed")]
    supervisor = started()
    supervisor.stop("stopped", 0.0)
    assert supervisor.store_ended("killed") == []


def test_living_ranks_do_without_the_zygote() -> None:
    supervisor = started()
    assert supervisor.zygote_ended("killed", "") == []
    assert supervisor.state == "ready"


# ---- running


def test_work_goes_to_its_ranks_as_it_came() -> None:
    supervisor = started()
    assert work(supervisor, 7, (0, 2)) == [ToRanks((0, 2), "work", FRAMES)]
    assert phases(supervisor) == ["running", "idle", "running"]


def test_control_does_not_make_a_rank_busy() -> None:
    supervisor = started()
    frames = encode([Parcel(Probe(1))])
    assert supervisor.relay(Relay((1,), "control", -1, 1), frames) == [ToRanks((1,), "control", frames)]
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


def test_equal_answers_go_up_as_one_as_soon_as_all_are_there() -> None:
    supervisor = started()
    work(supervisor, 1, (0, 1, 2))
    for rank in (2, 0):
        done(supervisor, rank, 1)
        assert supervisor.tick(0.0) == []
    done(supervisor, 1, 1)
    assert up(supervisor.tick(0.0)) == [Ranked((0, 1, 2), Done(1))]
    assert supervisor.deadline() is None


def test_a_failure_goes_up_at_once_while_others_run() -> None:
    supervisor = started()
    work(supervisor, 1, (0, 1, 2))
    failed = Failed(1, "ValueError", "no", "Traceback", 3)
    supervisor.from_rank(2, Parcel(failed), 0.0)
    assert up(supervisor.tick(0.0)) == [Ranked((2,), failed)]
    assert phases(supervisor) == ["running", "running", "idle"]


@pytest.mark.parametrize(
    "verb",
    [
        Output(1, "stdout", "x\n"),
        Skipped(1, 1, 10),
        Display(1, "display", b"{}"),
        RankState(5, 1, 1, 2, "f", "", "cpu", 0),
    ],
)
def test_what_ranks_say_goes_up_in_a_moment(verb: Any) -> None:
    supervisor = started()
    work(supervisor, 1, (0,))
    assert supervisor.from_rank(0, Parcel(verb), 1.0) == []
    due = supervisor.deadline()
    assert due is not None
    assert due < 1.1
    assert up(supervisor.tick(due)) == [Ranked((0,), verb)]


def test_answers_carry_their_buffers_up() -> None:
    supervisor = started()
    from cellmesh.wire.messages import Pickled

    verb = Done(1, Pickled(b"s", 1))
    work(supervisor, 1, (0,))
    supervisor.from_rank(0, Parcel(verb, (b"buffer",)), 0.0)
    [action] = supervisor.tick(0.0)
    assert action == Up([Parcel(Ranked((0,), verb), (b"buffer",))])


def test_what_comes_through_a_descriptor_belongs_to_the_run_in_progress() -> None:
    supervisor = started()
    for run in (4, 5):
        work(supervisor, run, (0,))
    supervisor.from_pipe(0, "stderr", "below Python\n", 0.0)
    done(supervisor, 0, 4)
    supervisor.from_pipe(0, "stdout", "next\n", 0.0)
    done(supervisor, 0, 5)
    supervisor.from_pipe(0, "stdout", "late\n", 0.0)
    outputs = [v.verb for v in up(supervisor.tick(LATER)) if isinstance(v.verb, Output)]
    assert outputs == [
        Output(4, "stderr", "below Python\n"),
        Output(5, "stdout", "next\n"),
        Output(5, "stdout", "late\n"),
    ]


def test_what_comes_through_a_descriptor_before_any_run_belongs_to_none() -> None:
    supervisor = started()
    supervisor.from_pipe(0, "stdout", "early\n", 0.0)
    assert up(supervisor.tick(LATER)) == [Ranked((0,), Output(-1, "stdout", "early\n"))]


def test_a_flood_through_a_descriptor_is_bounded_and_told() -> None:
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
    said = up(supervisor.tick(5.0 + LAST_WORDS_S))
    assert said == [Ranked((1,), Output(1, "stdout", "goodbye\n")), Died(1, "killed by SIGKILL", "goodbye")]
    assert supervisor.deadline() is None


def test_a_death_is_due_soon() -> None:
    supervisor = started()
    supervisor.rank_ended(1, "killed", "", 5.0)
    due = supervisor.deadline()
    assert due is not None
    assert due <= 5.0 + 0.1


def test_the_others_go_on_without_a_dead_rank() -> None:
    supervisor = started()
    work(supervisor, 1, (0, 1, 2))
    supervisor.rank_ended(1, "killed by SIGKILL", "", 0.0)
    assert supervisor.state == "ready"
    info = supervisor.report({})[1]
    assert (info.phase, info.pid, info.ending) == ("dead", 0, "killed by SIGKILL")
    assert supervisor.pids() == {0: 100, 2: 102}
    done(supervisor, 0, 1)
    done(supervisor, 2, 1)
    assert Ranked((0, 2), Done(1)) in up(supervisor.tick(0.0))


def test_answers_do_not_wait_for_a_dead_rank() -> None:
    supervisor = started()
    work(supervisor, 1, (0, 1))
    done(supervisor, 0, 1)
    assert supervisor.tick(0.0) == []
    supervisor.rank_ended(1, "killed", "", 0.0)
    assert up(supervisor.tick(0.0)) == [Ranked((0,), Done(1))]


def test_what_a_dying_ranks_flood_hid_is_told() -> None:
    supervisor = started()
    work(supervisor, 1, (0,))
    for _ in range(20):
        supervisor.from_pipe(0, "stderr", "error\n" * 10_000, 0.0)
    supervisor.rank_ended(0, "killed", "", 0.0)
    said = up(supervisor.tick(LATER))
    assert any(isinstance(v, Ranked) and isinstance(v.verb, Skipped) for v in said)
    assert isinstance(said[-1], Died)


# ---- restarting


def test_a_restart_kills_all_and_forks_all() -> None:
    supervisor = started()
    assert supervisor.restart() == [KillRanks((0, 1, 2))]
    assert supervisor.state == "restarting"
    assert supervisor.rank_ended(0, "killed", "", 0.0) == []
    assert supervisor.rank_ended(2, "killed", "", 0.0) == []
    assert supervisor.rank_ended(1, "killed", "", 0.0) == [ForkAll(2)]
    assert supervisor.state == "starting"
    supervisor.forked(pids(3, 2))
    for rank in range(3):
        actions = supervisor.from_rank(rank, READY, 0.0)
    assert isinstance(up(actions)[-1], MeshReady)
    assert supervisor.state == "ready"
    assert phases(supervisor) == ["idle"] * 3
    assert up(supervisor.tick(LATER)) == []


def test_a_restart_with_runs_in_flight_begins_afresh() -> None:
    supervisor = started(2)
    work(supervisor, 1, (0, 1))
    supervisor.restart()
    for rank in range(2):
        supervisor.rank_ended(rank, "killed", "", 0.0)
    supervisor.forked(pids(2, 2))
    for rank in range(2):
        supervisor.from_rank(rank, READY, 0.0)
    assert phases(supervisor) == ["idle", "idle"]
    work(supervisor, 2, (0, 1))
    done(supervisor, 0, 2)
    done(supervisor, 1, 2)
    assert up(supervisor.tick(0.0)) == [Ranked((0, 1), Done(2))]


def test_a_restart_without_living_ranks_forks_at_once() -> None:
    supervisor = started(2)
    for rank in range(2):
        supervisor.rank_ended(rank, "killed", "", 0.0)
    assert supervisor.restart() == [ForkAll(2)]


def test_a_death_just_before_a_restart_is_not_told_of_the_new_rank() -> None:
    supervisor = started(1)
    supervisor.rank_ended(0, "killed", "", 5.0)
    supervisor.restart()
    supervisor.forked(pids(1, 2))
    supervisor.from_rank(0, READY, 5.01)
    assert supervisor.state == "ready"
    assert [verb for verb in up(supervisor.tick(LATER)) if isinstance(verb, Died)] == []


def test_a_restart_before_torch_is_there_forks_once() -> None:
    supervisor = make(2)
    forks = of(ForkAll, supervisor.restart())
    forks += of(ForkAll, supervisor.zygote_ready(0))
    assert len(forks) == 1


def test_a_restart_while_ranks_start_replaces_them() -> None:
    supervisor = make(2)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(2))
    assert supervisor.restart() == [KillRanks((0, 1))]
    supervisor.rank_ended(0, "killed", "", 0.0)
    assert supervisor.rank_ended(1, "killed", "", 0.0) == [ForkAll(2)]


def test_a_second_restart_changes_nothing() -> None:
    supervisor = started(2)
    supervisor.restart()
    assert supervisor.restart() == []


def test_a_restart_whose_zygote_dies_fails() -> None:
    supervisor = started(1)
    supervisor.restart()
    supervisor.rank_ended(0, "killed", "", 0.0)
    actions = supervisor.zygote_ended("killed", "")
    assert isinstance(up(actions)[0], StartFailed)


def test_a_new_zygote_forks_for_a_restart() -> None:
    supervisor = started(1)
    supervisor.restart()
    assert of(ForkAll, supervisor.rank_ended(0, "killed", "", 0.0))
    assert of(ForkAll, supervisor.zygote_ready(0))


# ---- stopping


def test_a_stop_asks_all_to_leave_and_ends_when_they_have() -> None:
    supervisor = started()
    assert supervisor.stop("stopped", 5.0) == [AskToLeave((0, 1, 2))]
    assert supervisor.state == "stopping"
    assert supervisor.rank_ended(0, "exited with code 0", "", 5.1) == []
    assert supervisor.rank_ended(1, "exited with code 0", "", 5.1) == []
    actions = supervisor.rank_ended(2, "exited with code 0", "", 5.1)
    assert up(actions)[-1] == Stopped("stopped")
    assert actions[-1] == End("stopped")
    assert supervisor.state == "ended"


def test_stubborn_ranks_are_killed_until_they_are_gone() -> None:
    supervisor = started()
    supervisor.stop("stopped", 5.0)
    supervisor.rank_ended(1, "exited with code 0", "", 5.1)
    assert supervisor.deadline() == 5.0 + LEAVE_S
    assert supervisor.tick(5.0) == []
    assert of(KillRanks, supervisor.tick(5.0 + LEAVE_S)) == [KillRanks((0, 2))]
    supervisor.rank_ended(0, "killed", "", 6.1)
    due = supervisor.deadline()
    assert due is not None
    assert of(KillRanks, supervisor.tick(due)) == [KillRanks((2,))]
    assert of(End, supervisor.rank_ended(2, "killed", "", 9.0))


def test_a_stop_without_ranks_ends_at_once() -> None:
    supervisor = make()
    actions = supervisor.stop("stopped", 0.0)
    assert up(actions) == [Stopped("stopped")]
    assert of(End, actions) == [End("stopped")]


def test_a_second_stop_changes_nothing() -> None:
    supervisor = started()
    supervisor.stop("stopped", 0.0)
    assert supervisor.stop("again", 0.5) == []
    supervisor.rank_ended(0, "", "", 1.0)
    supervisor.rank_ended(1, "", "", 1.0)
    supervisor.rank_ended(2, "", "", 1.0)
    assert supervisor.stop("again", 2.0) == []


def test_a_stop_while_restarting_forks_nothing() -> None:
    supervisor = started(2)
    supervisor.restart()
    supervisor.rank_ended(0, "killed", "", 0.0)
    supervisor.stop("stopped", 0.0)
    actions = supervisor.rank_ended(1, "killed", "", 0.0)
    assert not of(ForkAll, actions)
    assert of(End, actions)


def test_a_stopping_mesh_takes_no_restart() -> None:
    supervisor = started()
    supervisor.stop("stopped", 0.0)
    assert supervisor.restart() == []
    assert supervisor.state == "stopping"


def test_what_ranks_said_last_goes_up_before_the_end() -> None:
    supervisor = started(1)
    work(supervisor, 1, (0,))
    supervisor.stop("stopped", 0.0)
    supervisor.from_rank(0, Parcel(Output(1, "stdout", "from an exit handler\n")), 0.1)
    actions = supervisor.rank_ended(0, "exited with code 0", "", 0.1)
    said = up(actions)
    assert said == [Ranked((0,), Output(1, "stdout", "from an exit handler\n")), Stopped("stopped")]


# ---- what there is to see


def test_the_report_has_memory_where_it_is_known() -> None:
    supervisor = started(2)
    assert [info.rss_bytes for info in supervisor.report({101: 5})] == [0, 5]


# ---- always

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "relay", "done", "died", "restart", "stop", "tick", "pipe", "zygote"]),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    max_size=50,
)


@given(EVENTS)
def test_whatever_happens_ranks_are_forked_into_an_empty_place_and_the_end_comes_once(
    events: Sequence[Any],
) -> None:
    supervisor, now, incarnation = make(), 0.0, 0
    living: set[int] = set()
    dying: set[int] = set()
    ended = 0

    def carry_out(actions: Sequence[Action]) -> None:
        nonlocal incarnation, ended
        for action in actions:
            assert not ended or not isinstance(action, Up | ForkAll | ToRanks)
            match action:
                case ForkAll():
                    assert not living, "ranks forked beside living ones"
                    incarnation += 1
                    assert action.incarnation == incarnation
                    living.update(range(3))
                    dying.clear()
                    carry_out(supervisor.forked(pids(3, incarnation)))
                case KillRanks(ranks) | AskToLeave(ranks):
                    assert set(ranks) <= living
                    dying.update(ranks)
                case ToRanks(ranks):
                    assert set(ranks) <= living
                case End():
                    assert not living, "ended before its ranks"
                    ended += 1

    carry_out(supervisor.zygote_ready(0))
    for kind, rank, run in events:
        now += 0.3
        if kind == "ready" and rank in living - dying and phases(supervisor)[rank] == "starting":
            carry_out(supervisor.from_rank(rank, READY, now))
        elif kind == "relay":
            carry_out(work(supervisor, run, (rank, 2)))
        elif kind == "done" and rank in living:
            carry_out(done(supervisor, rank, run, now))
        elif kind == "died" and rank in living:
            living.discard(rank)
            dying.discard(rank)
            carry_out(supervisor.rank_ended(rank, "killed", "", now))
        elif kind == "restart":
            carry_out(supervisor.restart())
        elif kind == "stop":
            carry_out(supervisor.stop("stopped", now))
        elif kind == "tick":
            carry_out(supervisor.tick(now))
        elif kind == "pipe" and rank in living:
            carry_out(supervisor.from_pipe(rank, "stdout", "x", now))
        elif kind == "zygote" and supervisor.state == "ready":
            carry_out(supervisor.zygote_ended("killed", ""))
        assert set(supervisor.pids()) == living
    carry_out(supervisor.stop("stopped", now))
    carry_out(supervisor.tick(now + LEAVE_S))
    for rank in sorted(living):
        living.discard(rank)
        carry_out(supervisor.rank_ended(rank, "killed", "", now))
    assert supervisor.state == "ended"
    assert ended == 1
