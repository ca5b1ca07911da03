"""Whatever happens to an agent, in whatever order."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import RankUnready, Respawned, RespawnFailed, StartFailed, Stopped
from cellmesh.workers.agent.supervisor import (
    LEAVE_S,
    MAX_STARTS_LOST,
    RESPAWN_S,
    Action,
    Fork,
    KillRanks,
    ToRanks,
    Up,
)

from ....support.supervisor_decisions import READY, done, make, phases, up, work

# ---- always

KINDS = (
    *("ready", "relay", "done", "died", "restart", "stop", "tick", "pipe"),
    *("respawn", "kill", "zygote lost", "zygote ready", "unready"),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 3)), max_size=60
)


@given(EVENTS)
def test_ranks_fork_into_empty_places_and_the_mesh_ends_once(events: Sequence[Any]) -> None:
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
                case KillRanks(ranks) | ToRanks(ranks, "control"):
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


NUM_RANKS = 2
WHOLE = ["idle"] * NUM_RANKS


class Host:
    """What an agent's shell does of what its supervisor decides; ranks are ready once all have met.

    Events are handled in the order of a queue. A killed rank ends at once; the supervisor receives
    the report of its end some events later.
    """

    def __init__(self) -> None:
        self.supervisor = make(NUM_RANKS)
        self.queue: collections.deque[Callable[[], None]] = collections.deque()
        self.said: list[Action] = []
        self.zygote = self.store = self.num_made = 0  # the number of each that lives, or 0
        self.is_zygote_known = self.is_zygote_ready = False
        self.known_store, self.store_end = 0, False
        # Rank -> its number, its store, whether it rejoins.
        self.ranks: dict[int, tuple[int, int, bool]] = {}
        self.start_zygote()

    def number(self) -> int:
        self.num_made += 1
        return self.num_made

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.said.append(action)
            match action:
                case Fork():
                    self.fork(action)
                case KillRanks(ranks) | ToRanks(ranks, "control"):
                    for rank in ranks:
                        self.kill(f"rank {rank}")

    # What the shell has, and forks.

    def start_zygote(self) -> None:
        self.zygote, self.is_zygote_known, self.is_zygote_ready = self.number(), True, False
        self.queue.append(lambda own=self.zygote: self.note_zygote_ready(own))

    def note_zygote_ready(self, number: int) -> None:
        if number != self.zygote:
            return
        self.is_zygote_ready = True
        if self.store_end:
            self.fork_store()
        self.act(self.supervisor.zygote_ready(0))

    def fork_store(self) -> None:
        if self.zygote:
            self.store = self.known_store = self.number()
            if self.store_end:
                self.store_end = False
                self.act(self.supervisor.store_ended("was killed"))

    def fork(self, order: Fork) -> None:
        if not self.is_zygote_known:
            self.start_zygote()
        if not self.is_zygote_ready:
            return
        if not self.known_store:
            self.fork_store()
        if not self.zygote:  # killed, and nobody knows yet
            self.act(self.supervisor.forked({}))
            return
        for rank in order.ranks:
            assert rank not in self.ranks, "forked beside its like"
            self.ranks[rank] = (self.number(), self.known_store, order.rejoin)
            self.queue.append(lambda rank=rank, own=self.ranks[rank]: self.meet(rank, own))
        self.act(self.supervisor.forked({rank: self.ranks[rank][0] for rank in order.ranks}))

    def meet(self, rank: int, own: tuple[int, int, bool]) -> None:
        """A rank becomes ready when the store that it was given lives, and waits else."""
        if self.ranks.get(rank) == own and (own[2] or own[1] == self.store != 0):
            self.act(self.supervisor.from_rank(rank, READY, 0.0))

    # What is killed.

    def kill(self, victim: str, delay: int = 0) -> None:
        if victim == "zygote" and self.zygote:
            self.zygote = 0
            self.tell(self.note_zygote_end, delay)
        elif victim == "store" and self.store:
            self.store = 0
            self.tell(self.note_store_end, delay)
        elif victim.startswith("rank") and (own := self.ranks.pop(int(victim[-1]), None)):
            end = self.supervisor.rank_ended
            self.tell(lambda: self.act(end(int(victim[-1]), f"ended {own}", "", 0.0)), delay)

    def tell(self, event: Callable[[], None], delay: int) -> None:
        self.queue.insert(delay, event)

    def note_zygote_end(self) -> None:
        self.is_zygote_known = self.is_zygote_ready = False
        self.act(self.supervisor.zygote_ended("was killed", ""))
        if not self.is_zygote_known and self.supervisor.state in ("ready", "starting"):
            self.start_zygote()

    def note_store_end(self) -> None:
        self.known_store, self.store_end = 0, True
        if self.is_zygote_ready:
            self.fork_store()
        if self.store_end and not self.is_zygote_known:
            self.act(self.supervisor.store_ended("was killed"))

    def run(self, losses: Sequence[tuple[int, str, int]] = ()) -> int:
        """Until nothing happens any more; returns how many events there were."""
        for step in itertools.count():
            for at, victim, delay in losses:
                if at == step:
                    self.kill(victim, delay)
            if not self.queue and all(at <= step for at, *_ in losses):
                return step
            if self.queue:
                self.queue.popleft()()
            assert step < 1000, "it does not come to rest"
        raise AssertionError


def begin(scenario: str) -> Host:
    host = Host()
    if scenario == "start":
        return host
    host.run()
    assert phases(host.supervisor) == WHOLE
    if scenario == "restart":
        host.act(host.supervisor.restart())
    elif scenario == "heal":
        host.kill("rank 1")
        host.run()
        host.act(host.supervisor.respawn((1,), 0.0))
    else:
        host.act(host.supervisor.stop("stopped", 0.0))
    return host


VICTIMS = ["zygote", "store", "rank 0", "rank 1"]
SCENARIOS = ["start", "restart", "heal", "stop"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_loss_at_any_point_of(scenario: str) -> None:
    num_steps = begin(scenario).run()
    points = list(itertools.product(range(num_steps + 2), VICTIMS, (0, 1, 3)))
    tried = [(one,) for one in points] + list(itertools.combinations(points, 2))
    for losses in tried:
        host = begin(scenario)
        host.run(losses)
        supervisor = host.supervisor
        is_clean = (
            supervisor.state == "ended"
            and not host.ranks
            and sum(isinstance(verb, Stopped) for verb in up(host.said)) == 1
        )
        has_failed = any(isinstance(verb, StartFailed) for verb in up(host.said))
        if scenario == "stop":
            assert is_clean, losses
        elif scenario == "start":  # a mesh that has never been: an error at once, and nothing left
            assert is_clean if has_failed else supervisor.state == "ready", losses
        else:  # a mesh that has been is not lost to so few losses
            assert supervisor.state == "ready", (losses, supervisor.state)
            assert "starting" not in phases(supervisor), losses
            if any(isinstance(verb, RespawnFailed) for verb in up(host.said)) or "dead" in phases(
                supervisor
            ):
                dead = [rank for rank in range(NUM_RANKS) if phases(supervisor)[rank] == "dead"]
                host.act(supervisor.respawn(dead, 0.0))
                host.run()
            assert phases(supervisor) == WHOLE, losses
            assert host.store, losses


def test_a_restart_that_keeps_losing_ranks_fails() -> None:
    host = begin("restart")
    for _ in range(MAX_STARTS_LOST + 1):
        while 0 not in host.ranks:
            host.queue.popleft()()
        host.kill("rank 0")
    host.run()
    (failed,) = (verb for verb in up(host.said) if isinstance(verb, StartFailed))
    assert "rank 0 ended" in failed.text
    assert host.supervisor.state == "ended"


def test_a_rank_that_cannot_be_spoken_to_is_killed_and_has_died_of_that() -> None:
    host = begin("heal")
    host.run()
    supervisor = host.supervisor
    assert supervisor.kill((1,), "closed its connection: killed") == [KillRanks((1,))]
    supervisor.rank_ended(1, "was killed by SIGKILL", "", 0.0)
    (died,) = up(supervisor.tick(1.0))
    assert died.reason == "closed its connection: killed"
    assert supervisor.kill((1,), "closed its connection: killed") == []
