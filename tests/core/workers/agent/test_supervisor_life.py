"""The life of a mesh as its agent decides it: starting, restarting, stopping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import (
    MeshReady,
    Progress,
    Ranked,
    RankUnready,
    StartFailed,
    Stopped,
    StoreDied,
)
from cellmesh.wire.user_code import Output
from cellmesh.workers.agent.supervisor import (
    LEAVE_S,
    MAX_ZYGOTES_LOST,
    Action,
    Fork,
    KillRanks,
    Supervisor,
)

from ....support.supervisor_decisions import (
    make,
    of,
    pids,
    started,
    up,
    work,
)

# ---- starting


def test_later_controller_gets_the_progress_of_the_start() -> None:
    assert isinstance(make().progress().verb, Progress)
    supervisor = started()
    assert supervisor.progress().verb == MeshReady(supervisor.report({}), 0, 1)


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
    assert not of(Fork, actions)


@pytest.mark.parametrize(
    ("backend", "num_gpus"), [("nccl", 3), ("nccl", 8), ("auto", 0), ("gloo", 0)]
)
def test_valid_start_is_begun(backend: str, num_gpus: int) -> None:
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


def starting(num_ranks: int = 2) -> Supervisor:
    """One whose ranks have been forked, and are not ready."""
    supervisor = make(num_ranks)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(num_ranks))
    return supervisor


def test_a_rank_that_cannot_start_ends_the_start_once() -> None:
    supervisor = starting()
    actions = supervisor.from_rank(0, Parcel(RankUnready("RuntimeError: no network")), 0.0)
    assert up(actions) == [StartFailed("host", "rank 0 could not start: RuntimeError: no network")]
    assert of(KillRanks, actions) == [KillRanks((0, 1))]
    assert up(supervisor.from_rank(1, Parcel(RankUnready("no")), 0.0)) == []
    assert supervisor.zygote_ended("killed", "") == []


def test_ranks_forked_too_late_are_killed() -> None:
    supervisor = make(2)
    supervisor.zygote_ready(0)
    assert up(supervisor.stop("stopped", 0.0)) == [Stopped("stopped")]
    assert of(KillRanks, supervisor.forked(pids(2))) == [KillRanks((0, 1))]
    assert supervisor.zygote_ready(0) == []


def test_store_death_is_reported_while_ranks_live() -> None:
    assert up(started().store_ended("killed")) == [StoreDied("killed")]
    supervisor = started()
    supervisor.stop("stopped", 0.0)
    assert supervisor.store_ended("killed") == []


# ---- restarting


def test_a_restart_without_living_ranks_forks_at_once() -> None:
    supervisor = started(2)
    for rank in range(2):
        supervisor.rank_ended(rank, "killed", "", 0.0)
    assert supervisor.restart() == [Fork((0, 1), 2)]


def test_a_restart_before_torch_is_there_forks_once() -> None:
    supervisor = make(2)
    forks = of(Fork, supervisor.restart())
    forks += of(Fork, supervisor.zygote_ready(0))
    assert len(forks) == 1


def test_a_restart_while_ranks_start_replaces_them() -> None:
    supervisor = starting()
    assert supervisor.restart() == [KillRanks((0, 1))]
    supervisor.rank_ended(0, "killed", "", 0.0)
    assert supervisor.rank_ended(1, "killed", "", 0.0) == [Fork((0, 1), 2)]


def test_a_restart_whose_zygotes_keep_dying_fails() -> None:
    supervisor = started(1)
    supervisor.restart()
    assert supervisor.rank_ended(0, "killed", "", 0.0) == [Fork((0,), 2)]
    for _ in range(MAX_ZYGOTES_LOST):
        assert supervisor.zygote_ended("killed", "") == [Fork((0,), 2)]
    actions = supervisor.zygote_ended("killed by SIGSEGV", "words")
    assert up(actions)[0] == StartFailed("host", "the zygote killed by SIGSEGV\nwords")


# ---- stopping


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
    assert up(supervisor.rank_ended(2, "killed", "", 9.0)) == [Stopped("stopped")]


def test_a_second_stop_changes_nothing() -> None:
    supervisor = started()
    supervisor.stop("stopped", 0.0)
    assert supervisor.stop("again", 0.5) == supervisor.restart() == []
    assert supervisor.state == "stopping"
    for rank in range(3):
        supervisor.rank_ended(rank, "", "", 1.0)
    assert supervisor.stop("again", 2.0) == []


def test_a_stop_while_restarting_forks_nothing() -> None:
    supervisor = started(2)
    supervisor.restart()
    supervisor.rank_ended(0, "killed", "", 0.0)
    supervisor.stop("stopped", 0.0)
    actions = supervisor.rank_ended(1, "killed", "", 0.0)
    assert not of(Fork, actions)
    assert supervisor.state == "ended"


def test_last_messages_of_ranks_go_up_before_the_end() -> None:
    supervisor = started(1)
    work(supervisor, 1, (0,))
    supervisor.stop("stopped", 0.0)
    last = Output(1, "stdout", "from an exit handler\n")
    supervisor.from_rank(0, Parcel(last), 0.1)
    said = up(supervisor.rank_ended(0, "exited with code 0", "", 0.1))
    assert said == [Ranked((0,), last), Stopped("stopped")]
