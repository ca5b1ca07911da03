"""Another number of ranks on a host, as an agent decides it."""

from __future__ import annotations

from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import MeshReady, RankReady, Respawned, RespawnFailed
from cellmesh.workers.agent.supervisor import Fork, KillRanks

from ....support.supervisor_decisions import (
    LATER,
    READY,
    make,
    of,
    phases,
    pids,
    started,
    up,
)


def test_new_ranks_are_dead_until_they_are_forked() -> None:
    supervisor = started(2)
    assert supervisor.resize(range(4), 0.0) == []
    assert phases(supervisor) == ["idle", "idle", "dead", "dead"]
    assert supervisor.respawn((2, 3), 0.0) == [Fork((2, 3), 1, rejoin=True)]
    supervisor.forked({2: 202, 3: 203})
    supervisor.from_rank(2, READY, 0.0)
    (respawned,) = up(supervisor.from_rank(3, READY, 0.0))
    assert [info.rank for info in respawned.ranks] == [2, 3]
    assert isinstance(respawned, Respawned)


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
