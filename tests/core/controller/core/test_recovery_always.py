"""Whatever happens, and in whatever order it is heard of: the mesh comes back, and no run hangs."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cellmesh.controller.core.recovery import FIRST_HEAL

from ....support.examples import examples
from ....support.simulated_mesh import (
    ASYNC,
    COLLECTIVE,
    COMPUTE,
    DIE,
    FAIL,
    FOREVER,
    SWALLOW,
    Simulation,
)

SEEDS = st.integers(0, 2**32)
RANKS = st.integers(0, 4)
PARTS = st.lists(
    st.sampled_from(
        [
            (COLLECTIVE, "world"),
            (COLLECTIVE, "world"),
            (COLLECTIVE, "pair0"),
            (COLLECTIVE, "pair2"),
            (ASYNC, "world"),
            (COMPUTE, 0.3),
            (COMPUTE, 3.0),
        ]
    ),
    max_size=5,
)
# rank, after how many steps, what it does instead of the rest
FAULT = st.tuples(RANKS, st.integers(0, 5), st.sampled_from([FAIL, DIE, "return", FOREVER]))
FAULTS = st.lists(FAULT, max_size=2)


class Mesh(RuleBasedStateMachine):
    """A user, and faults."""

    pipelines = True  # the user submits runs while others are in flight

    @initialize(
        num_ranks=st.integers(2, 5),
        seed=SEEDS,
        hangs=st.booleans(),
        auto_heal=st.booleans(),
    )
    def start(self, num_ranks: int, seed: int, hangs: bool, auto_heal: bool) -> None:
        self.sim = Simulation(num_ranks, seed, hangs, auto_heal=auto_heal)
        self.needs_user = False

    # ---- the user

    @rule(
        first=RANKS,
        count=st.integers(1, 5),
        parts=PARTS,
        faults=FAULTS,
        swallows=st.sampled_from([False, False, False, True]),
        waits=st.booleans(),
    )
    def submit(
        self, first: int, count: int, parts: Any, faults: Any, swallows: bool, waits: bool
    ) -> None:
        sim = self.sim
        if not self.pipelines and (sim.in_flight or sim.choices()):
            return
        ranks = list(range(first % sim.num_ranks, sim.num_ranks))[:count]
        groups = {name for name, members in sim.members.items() if set(members) <= set(ranks)}
        whole = [part for part in parts if part[0] == COMPUTE or part[1] in groups]
        programs: dict[int, Any] = {}
        for rank in ranks:
            own = [part for part in whole if part[0] == COMPUTE or rank in sim.members[part[1]]]
            for who, after, fault in faults:
                if who % sim.num_ranks == rank:
                    own = [*own[:after], *([] if fault == "return" else [(fault,)])]
                    self.needs_user |= fault == FOREVER
            programs[rank] = [(SWALLOW,), *own] if swallows else own
        run = sim.submit(ranks, programs)
        if waits:
            sim.carry_out(sim.core.wait_for(run))

    @rule(which=st.integers(0, 3))
    def interrupt(self, which: int) -> None:
        for run in sorted(self.sim.in_flight)[which : which + 1]:
            self.sim.runs[run].interrupt()

    @rule()
    def heal(self) -> None:
        self.sim.heal()

    @rule(sure=st.integers(0, 3))
    def restart(self, sure: int) -> None:
        if sure == 3:
            self.sim.restart()

    # ---- faults

    @rule(rank=RANKS)
    def kill(self, rank: int) -> None:
        self.sim.kill(rank % self.sim.num_ranks)

    @rule(rank=RANKS, seconds=st.sampled_from([0.5, 1.5, 3.0]))
    def silence(self, rank: int, seconds: float) -> None:
        self.sim.silence(rank % self.sim.num_ranks, seconds)

    @rule(fails=st.booleans())
    def forking(self, fails: bool) -> None:
        self.sim.fork_fails = fails

    @rule(port=st.sampled_from([0, 4321]))
    def lose_store(self, port: int) -> None:
        self.sim.lose_store(port)

    # ---- time

    @rule(count=st.integers(1, 30))
    def happen(self, count: int) -> None:
        self.sim.happen(count)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.1, 4.0]))
    def wait(self, seconds: float) -> None:
        self.sim.wait(seconds)

    @invariant()
    def heals_are_numbered(self) -> None:
        numbers = [heal.run for heal in self.sim.heals_sent] if hasattr(self, "sim") else []
        assert len(set(numbers)) == len(numbers)
        assert all(number >= FIRST_HEAL for number in numbers)

    # ---- the end

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.wait(30.0)
        if self.needs_user or self.pipelines:
            self.stop_all()
        assert sim.in_flight == set(), sim.core.mesh.pending
        self.check_quiet()
        self.check_whole()

    def stop_all(self) -> None:
        for _ in range(4):
            for run in sorted(self.sim.in_flight):
                self.sim.runs[run].interrupt()
            self.sim.wait(2.0)
            for run in sorted(self.sim.in_flight):
                self.sim.runs[run].interrupt()
            self.sim.wait(10.0)

    def check_quiet(self) -> None:
        sim, core = self.sim, self.sim.core
        sim.wait(1.0)
        assert core.mesh.pending == {}
        assert core._recovery.phase == "calm"
        assert core.mesh.held == {}
        assert set(sim.requests) <= sim.answers.keys()
        assert [rank.rank for rank in sim.ranks.values() if rank.holds_back or rank.inbox] == []
        assert (core.deadline(), sim.supervisor.deadline()) == (None, None)
        assert not sim.choices()

    def check_whole(self) -> None:
        """What lives can be healed and used again."""
        sim = self.sim
        sim.fork_fails = False
        request = sim.heal()
        sim.wait(5.0)
        assert sim.core.dead == {}
        assert len(sim.ranks) == sim.num_ranks
        assert sim.answers[request].failure == ""
        for _ in range(2):
            every = {rank: [(COLLECTIVE, "world")] for rank in sim.ranks}
            sim.submit(tuple(range(sim.num_ranks)), every)
            sim.wait(0.5)
            assert sim.in_flight == set()
            assert not any(rank.holds_back for rank in sim.ranks.values())
        self.check_quiet()


class PatientMesh(Mesh):
    """As `Mesh`, where one run is in flight at a time; nobody needs to stop what cannot go on."""

    pipelines = False


class ChangingHands(Mesh):
    """As `Mesh`, where other controllers take over."""

    @rule(is_idle=st.booleans())
    def attach(self, is_idle: bool) -> None:
        while is_idle and self.sim.deliver_down():
            pass  # else the messages to the agent are lost
        self.sim.leave()
        self.sim.attach()


SETTINGS = settings(
    examples(80),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMesh = Mesh.TestCase
TestMesh.settings = SETTINGS
TestPatientMesh = PatientMesh.TestCase
TestPatientMesh.settings = SETTINGS
TestChangingHands = ChangingHands.TestCase
TestChangingHands.settings = SETTINGS
