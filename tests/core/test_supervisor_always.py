"""Whatever happens to an agent, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cellmesh.workers.supervisor import (
    LEAVE_S,
    Action,
    AskToLeave,
    End,
    ForkAll,
    KillRanks,
    ToRanks,
    Up,
)

from .supervising import READY, done, make, phases, pids, work

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
