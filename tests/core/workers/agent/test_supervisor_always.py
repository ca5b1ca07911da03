"""Whatever happens to an agent, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import RankUnready, Respawned, RespawnFailed, Stopped
from cellmesh.workers.agent.supervisor import (
    LEAVE_S,
    RESPAWN_S,
    Action,
    AskToLeave,
    Fork,
    KillRanks,
    ToRanks,
    Up,
)

from ....support.supervisor_decisions import READY, done, make, phases, work

# ---- always

KINDS = (
    *("ready", "relay", "done", "died", "restart", "stop", "tick", "pipe"),
    *("respawn", "kill", "zygote lost", "zygote ready", "unready"),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 3)), max_size=60
)


@given(EVENTS)
def test_ranks_are_forked_into_empty_places_and_the_mesh_ends_once_for_any_events(
    events: Sequence[Any],
) -> None:
    supervisor, now, num_forks = make(), 0.0, 0
    living: set[int] = set()
    dying: set[int] = set()
    asked = answered = ended = 0
    has_zygote = True

    def carry_out(actions: Sequence[Action]) -> None:
        nonlocal num_forks, ended, answered
        for action in actions:
            assert not ended or not isinstance(action, Up | Fork | ToRanks)
            match action:
                case Fork(ranks, _, rejoin):
                    assert ranks
                    assert not living.intersection(ranks), "a rank forked beside its like"
                    assert rejoin or not living, "ranks forked beside living ones"
                    if has_zygote:
                        num_forks += 1
                        living.update(ranks)
                        dying.difference_update(ranks)
                        carry_out(
                            supervisor.forked({rank: 100 * num_forks + rank for rank in ranks})
                        )
                case KillRanks(ranks) | AskToLeave(ranks):
                    assert set(ranks) <= living
                    dying.update(ranks)
                case ToRanks(ranks):
                    assert set(ranks) <= living
                case Up(parcels):
                    verbs = [type(parcel.verb) for parcel in parcels]
                    answered += verbs.count(Respawned) + verbs.count(RespawnFailed)
                    ended += verbs.count(Stopped)
                    assert not living or Stopped not in verbs, "ended before its ranks"

    def reap(rank: int) -> None:
        living.discard(rank)
        dying.discard(rank)
        carry_out(supervisor.rank_ended(rank, "was killed by SIGKILL", "", now))

    carry_out(supervisor.zygote_ready(0))
    for kind, rank, run in events:
        now += 0.3
        starts = rank in living - dying and phases(supervisor)[rank] == "starting"
        if kind == "ready" and starts:
            carry_out(supervisor.from_rank(rank, READY, now))
        elif kind == "unready" and starts:
            carry_out(supervisor.from_rank(rank, Parcel(RankUnready("no")), now))
        elif kind == "relay":
            carry_out(work(supervisor, run, (rank, 2)))
        elif kind == "done" and rank in living:
            carry_out(done(supervisor, rank, run, now))
        elif kind == "died" and rank in living:
            reap(rank)
        elif kind == "restart":
            carry_out(supervisor.restart())
            asked = answered = 0
        elif kind == "stop":
            carry_out(supervisor.stop("stopped", now))
            asked = answered = 0
        elif kind == "respawn":
            if asked == answered:  # as a controller does: one after the other
                asked += 1
                carry_out(supervisor.respawn((rank,), now))
        elif kind == "kill":
            carry_out(supervisor.kill((rank,)))
        elif kind == "tick":
            carry_out(supervisor.tick(now))
        elif kind == "pipe" and rank in living:
            carry_out(supervisor.from_pipe(rank, "stdout", "x", now))
        elif kind == "zygote lost" and has_zygote:
            has_zygote = False
            carry_out(supervisor.zygote_ended("was killed by SIGKILL", ""))
        elif kind == "zygote ready" and not has_zygote:
            has_zygote = True
            carry_out(supervisor.zygote_ready(0))
        assert set(supervisor.pids()) == living
    if supervisor.state == "ready":
        for rank in sorted(dying):
            reap(rank)
        now += RESPAWN_S
        carry_out(supervisor.tick(now))
        for rank in sorted(dying):
            reap(rank)
        assert asked == answered, "a respawn without an end"
        assert "starting" not in phases(supervisor)
    carry_out(supervisor.stop("stopped", now))
    carry_out(supervisor.tick(now + LEAVE_S))
    for rank in sorted(living):
        reap(rank)
    assert supervisor.state == "ended"
    assert ended == 1
