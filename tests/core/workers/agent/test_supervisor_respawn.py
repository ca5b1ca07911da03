"""Single ranks that are forked anew, and killed, as an agent decides it."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Died, RankUnready, Respawned, RespawnFailed
from cellmesh.workers.agent.supervisor import (
    KILLED,
    LAST_WORDS_S,
    MAX_ZYGOTES_LOST,
    RESPAWN_S,
    Fork,
    KillRanks,
    Supervisor,
)

from ....support.supervisor_decisions import LATER, READY, done, of, phases, started, up, work


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


@pytest.mark.parametrize("ranks", [(0,), (), (7,)])
def test_without_a_dead_rank_there_is_nothing_to_fork(ranks: tuple[int, ...]) -> None:
    [failed] = up(bereft(2).respawn(ranks, 0.0))
    assert failed == RespawnFailed(ranks, "none of them is dead, or not yet")


@pytest.mark.parametrize("verb", ["restart", "stop"])
def test_a_mesh_that_is_not_ready_forks_no_single_rank(verb: str) -> None:
    supervisor = bereft(2)
    supervisor.restart() if verb == "restart" else supervisor.stop("", 0.0)
    [failed] = up(supervisor.respawn((2,), 0.0))
    assert failed == RespawnFailed((2,), f"the mesh is {supervisor.state}")


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


def test_a_new_rank_that_cannot_start_fails_the_respawn_only() -> None:
    supervisor = reborn(1)
    unready = Parcel(RankUnready("RuntimeError: no device"))
    assert supervisor.from_rank(1, unready, 0.0) == [KillRanks((1,))]
    [failed] = up(supervisor.rank_ended(1, "was killed by SIGKILL", "", 0.0))
    assert failed == RespawnFailed((1,), "rank 1 could not start: RuntimeError: no device")
    assert supervisor.state == "ready"


def test_death_of_a_living_rank_during_a_fork_is_reported_and_the_fork_goes_on() -> None:
    supervisor = reborn(2)
    supervisor.rank_ended(0, "was killed by SIGKILL", "", 0.0)
    assert up(supervisor.tick(1.0)) == [Died(0, "was killed by SIGKILL", "")]
    [respawned] = up(supervisor.from_rank(2, READY, 0.0))
    assert [info.rank for info in respawned.ranks] == [2]


def test_more_ranks_can_be_requested_during_a_fork() -> None:
    supervisor = reborn(2)
    supervisor.rank_ended(0, "was killed by SIGKILL", "", 0.0)
    supervisor.tick(1.0)
    assert supervisor.respawn((0, 2), 1.0) == [Fork((0,), 1, rejoin=True)]
    supervisor.forked({0: 200})
    assert supervisor.from_rank(2, READY, 1.0) == []
    [respawned] = up(supervisor.from_rank(0, READY, 1.0))
    assert [info.rank for info in respawned.ranks] == [0, 2]


def test_a_zygote_that_ends_before_it_has_forked_is_replaced_but_not_for_ever() -> None:
    supervisor = bereft(1)
    supervisor.respawn((1,), 0.0)
    for _ in range(MAX_ZYGOTES_LOST):
        assert supervisor.zygote_ended("was killed by SIGKILL", "") == [Fork((1,), 1, rejoin=True)]
    [failed] = up(supervisor.zygote_ended("was killed by SIGKILL", "words"))
    assert failed == RespawnFailed((1,), "the zygote was killed by SIGKILL\nwords")
    assert phases(supervisor) == ["idle", "dead", "idle"]
    assert supervisor.zygote_ready(0) == []


def test_new_zygote_forks_missing_ranks_only() -> None:
    supervisor = bereft(1)
    assert supervisor.zygote_ready(0) == []
    supervisor.respawn((1,), 0.0)
    assert supervisor.zygote_ready(0) == [Fork((1,), 1, rejoin=True)]
    supervisor.forked({1: 201})
    assert supervisor.zygote_ready(0) == []


@pytest.mark.parametrize("fault", ["user", "host"])
def test_failed_fork_leaves_living_ranks_alone(fault: Literal["user", "host"]) -> None:
    supervisor = bereft(0, 1)
    supervisor.respawn((0, 1), 0.0)
    [failed] = up(supervisor.fail("too many open files", fault))
    assert failed == RespawnFailed((0, 1), "too many open files")
    assert supervisor.state == "ready"
    assert supervisor.pids() == {2: 102}


def test_ranks_that_hang_while_they_start_are_given_up() -> None:
    supervisor = reborn(1)
    assert supervisor.deadline() == RESPAWN_S
    assert supervisor.tick(RESPAWN_S) == [KillRanks((1,))]
    [failed] = up(supervisor.rank_ended(1, "was killed by SIGKILL", "", RESPAWN_S))
    assert "not ready after 60 s" in failed.text


def test_rank_that_cannot_be_killed_is_reported() -> None:
    supervisor = reborn(1)
    supervisor.tick(RESPAWN_S)
    due = supervisor.deadline()
    assert due is not None
    assert isinstance(up(supervisor.tick(due))[0], RespawnFailed)
    assert supervisor.deadline() is None


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_restart_forgets_a_respawn(is_forked: bool) -> None:
    supervisor = bereft(2)
    supervisor.respawn((2,), 0.0)
    if is_forked:
        supervisor.forked({2: 202})
    supervisor.restart()
    actions: list[Any] = []
    for rank in sorted(supervisor.pids()):
        actions += supervisor.rank_ended(rank, "was killed by SIGKILL", "", 0.0)
    assert actions == [Fork((0, 1, 2), 2)]
    supervisor.forked({rank: 300 + rank for rank in range(3)})
    for rank in range(3):
        supervisor.from_rank(rank, READY, 0.0)
    assert supervisor.state == "ready"
    assert up(supervisor.tick(LATER)) == []


# ---- kills


def test_a_rank_that_did_not_stop_is_killed_and_its_death_says_so() -> None:
    supervisor = started(3)
    work(supervisor, 1, (0, 1))
    assert supervisor.kill((1, 7)) == [KillRanks((1,))]
    done(supervisor, 0, 1)
    supervisor.rank_ended(1, "was killed by SIGKILL", "words", 0.0)
    assert Died(1, KILLED, "words") in up(supervisor.tick(LATER))
    assert supervisor.kill((1,)) == []


def test_a_new_rank_has_not_been_killed() -> None:
    supervisor = started(1)
    supervisor.kill((0,))
    supervisor.rank_ended(0, "was killed by SIGKILL", "", 0.0)
    supervisor.tick(LATER)
    supervisor.respawn((0,), 0.0)
    supervisor.forked({0: 200})
    supervisor.from_rank(0, READY, 0.0)
    supervisor.rank_ended(0, "exited with code 3", "", 0.0)
    assert up(supervisor.tick(LATER)) == [Died(0, "exited with code 3", "")]
