"""A mesh whose ranks run programs, for controller and agent to bring back from anything.

Ranks count collectives, wait for each other in them, hold back after a failure, heal together, are
silent for a while, and die. Every message waits until it is delivered, in any order that sockets
allow: messages on one socket stay in order, and nothing else does.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellmesh.controller.core.core import Effect, Finish, Send
from cellmesh.wire.attach import Welcome
from cellmesh.wire.codec import Parcel, at_rank_for_control, at_rank_for_work
from cellmesh.wire.groups import Blueprint, Describe, GroupCount, Heal, InFlight
from cellmesh.wire.messages import Done, Failed, Interrupt, RankReady, Relay, Release, Resume
from cellmesh.wire.status import Probe, RankState
from cellmesh.wire.stopping import QUIET_MAX_S, Pause, StopState
from cellmesh.wire.verbs import RunCell
from cellmesh.workers.agent.supervisor import Fork

from .world import BothSides, Frames

Step = Sequence[Any]
# The steps of a rank's program in a run.
COLLECTIVE, ASYNC, COMPUTE, FOREVER, FAIL, DIE, SWALLOW = (
    "collective",
    "async",
    "compute",
    "forever",
    "fail",
    "die",
    "swallow",
)


@dataclass
class Group:
    """A rank's side of a process group."""

    members: tuple[int, ...]
    generation: int = 0
    begun: int = 0
    is_down: bool = False


@dataclass
class SimulatedRank:
    """One rank's process."""

    rank: int
    pid: int
    groups: dict[str, Group]
    inbox: collections.deque[Any] = field(default_factory=collections.deque)
    control: collections.deque[Any] = field(default_factory=collections.deque)
    said: dict[str, collections.deque[Any]] = field(
        default_factory=lambda: {"work": collections.deque(), "control": collections.deque()}
    )
    is_doomed: bool = False
    was_asked_to_leave: bool = False
    is_ready: bool = False
    holds_back: bool = False
    is_broken: bool = False
    current: Any = None
    steps: list[Step] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    waits_in: tuple[str, int, int] | None = None  # group, generation, number
    since: float = 0.0
    until: float | None = None
    swallows: bool = False
    cancelled: set[int] = field(default_factory=set)
    silent_until: float = 0.0

    def ready(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            self.said["control"].append(RankReady("cpu", "gloo"))

    def hear_work(self, frames: Frames) -> None:
        self.inbox.extend(verb for verb, _ in at_rank_for_work().decode(frames))

    def hear_control(self, frames: Frames) -> None:
        self.control.extend(verb for verb, _ in at_rank_for_control().decode(frames))

    @property
    def runs(self) -> list[int]:
        """The user's runs that it has not ended."""
        return [verb.run for verb in [self.current, *self.inbox] if type(verb) is RunCell]


class Simulation(BothSides[SimulatedRank]):
    """The mesh.

    Args:
        num_ranks: number of ranks.
        seed: decides in which order things happen.
        hangs_on_death: whether collectives hang that a dead rank had a part in, or raise.
        options: the core's.
    """

    def __init__(self, num_ranks: int, seed: int, hangs_on_death: bool, **options: Any) -> None:
        self.generations = itertools.count(1)
        super().__init__(num_ranks, new_generation=self.generations.__next__, **options)
        self.random = random.Random(seed)
        self.hangs_on_death = hangs_on_death
        self.members = {"world": tuple(range(num_ranks))}
        self.members |= {f"pair{i}": (i, i + 1) for i in range(0, num_ranks - 1, 2)}
        self.fork_fails = False
        self.num_seen = itertools.count(1)
        self.submitted_at: dict[int, int] = {}  # run -> how many things had been seen then
        self.finished_at: dict[int, int] = {}
        self.pairs: dict[tuple[str, int, int], dict[int, int]] = {}  # collective -> rank -> run
        self.requests: list[int] = []
        self.heals: dict[int, set[int]] = {}  # run -> ranks that have not ended it
        self.arrived: dict[int, set[int]] = {}  # heal's run -> ranks that have begun it
        self.heals_sent: list[Heal] = []
        self.has_attached = False
        self.cuts: set[tuple[str, int]] = set()  # connections that have ended: group, generation
        self.start()

    # ---- the user and faults

    def submit(self, ranks: Sequence[int], programs: dict[int, list[Step]]) -> int:
        number = max(self.runs, default=self.spool.next_run - 1) + 1
        self.submitted_at[number] = next(self.num_seen)
        self.finished_at.pop(number, None)
        assert self.begin(RunCell(0, json.dumps(programs), "", b"", 0), ranks).number == number
        return number

    def heal(self) -> int:
        self.requests.append(super().heal())
        return self.requests[-1]

    def attach(self) -> Welcome:
        self.has_attached = True
        self.requests.clear()
        welcome = super().attach()
        for info in welcome.runs:
            self.finished_at.pop(info.run, None)
        return welcome

    def kill(self, rank: int) -> None:
        """A rank's process ends; while all ranks start, one that does would end the mesh."""
        if rank in self.ranks and self.supervisor.state != "starting":
            self.reap(rank)

    def reap(self, rank: int, reason: str = "was killed", last_output: str = "") -> None:
        dying = self.ranks[rank]
        for verb in itertools.chain(*dying.said.values()):
            self._hear_rank(rank, verb)
        for left in self.heals.values():
            left.discard(rank)
        if not self.hangs_on_death:
            self.cuts.update((name, group.generation) for name, group in dying.groups.items())
        super().reap(rank, reason, last_output)

    def silence(self, rank: int, seconds: float) -> None:
        if rank in self.ranks:
            self.ranks[rank].silent_until = self.now + seconds

    def lose_store(self, port: int) -> None:
        if self.supervisor.state == "ready":
            self.supervisor.store_port = port
            self.act(self.supervisor.store_ended("was killed"))

    # ---- messages and time

    def choices(self) -> list[Callable[[], object]]:
        """Everything that could happen next without time passing."""
        found: list[Callable[[], object]] = []
        if self.to_controller:
            found.append(self.deliver_up)
        if self.to_agent:
            found.append(self.deliver_down)
        if super().deadline() <= self.now:
            found.append(self.tick)
        for number, rank in self.ranks.items():
            found += [
                lambda n=number, s=s: self._hear_rank(n, s.popleft())
                for s in rank.said.values()
                if s
            ]
            if rank.is_doomed:
                found.append(lambda n=number: self.reap(n))
                continue
            if not rank.is_ready:
                found.append(rank.ready)
            if rank.control and rank.silent_until <= self.now:
                found.append(lambda r=rank: self._obey_control(r, r.control.popleft()))
            if self._can_go_on(rank):
                found.append(lambda r=rank: self._go_on(r))
        return found

    def happen(self, limit: int = 100_000) -> None:
        """Let things happen, in a random order."""
        for _ in range(limit):
            found = self.choices()
            if not found:
                return
            self.random.choice(found)()
        assert limit < 100_000, "it never becomes quiet"

    def deliver(self) -> None:
        self.happen()

    def deadline(self) -> float:
        times = [super().deadline()]
        for rank in self.ranks.values():
            times += [rank.until] if rank.until is not None else []
            times += [rank.silent_until] if rank.control and rank.silent_until > self.now else []
        return min(times)

    # ---- the controller's side

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(Parcel(Relay() as relay, frames)):
                    self._check_sent(relay, frames)
                case Finish(run):
                    self.finished_at[run] = next(self.num_seen)
        super().carry_out(effects)

    def _check_sent(self, relay: Relay, frames: Frames) -> None:
        assert relay.ranks, "a message to nobody"
        assert not set(relay.ranks) & self.core.dead.keys(), f"sent to the dead: {relay}"
        codec = at_rank_for_work() if relay.channel == "work" else at_rank_for_control()
        for verb, _ in codec.decode(frames):
            if type(verb) is RunCell:
                assert verb.run in self.in_flight, f"run {verb.run} is sent and has ended"
            if type(verb) is Heal:
                self._check_heal(verb)

    def _check_heal(self, heal: Heal) -> None:
        others = any(left & self.ranks.keys() for left in self.heals.values())
        assert self.has_attached or not others, "two heals at once"
        self.heals_sent.append(heal)
        self.heals[heal.run] = {rank for rank in heal.ranks if rank in self.ranks}
        for rank in heal.ranks:
            state = self.ranks.get(rank)
            if state is None or self.has_attached:
                continue
            waiting = [run for run in state.runs if run not in state.cancelled]
            assert state.holds_back or not waiting, (
                f"rank {rank} is to heal and has {waiting} to run"
            )
            if not state.groups:
                old = [r for r in heal.ranks if r in self.ranks and self.ranks[r].groups]
                assert heal.blueprint or not old, (heal, old)

    # ---- the agent

    def _hear_rank(self, rank: int, verb: Any) -> None:
        self.act(self.supervisor.from_rank(rank, Parcel(verb), self.now))

    def _fork(self, order: Fork) -> None:
        if order.rejoin and self.fork_fails:
            self.act(self.supervisor.fail("cannot fork"))
        else:
            super()._fork(order)

    def _new_rank(self, order: Fork, rank: int, pid: int) -> SimulatedRank:
        groups = {} if order.rejoin else self._groups_of(rank, -order.incarnation)
        return SimulatedRank(rank, pid, groups)

    def _groups_of(self, rank: int, generation: int) -> dict[str, Group]:
        return {
            name: Group(members, generation)
            for name, members in self.members.items()
            if rank in members
        }

    # ---- a rank

    def _obey_control(self, rank: SimulatedRank, verb: Any) -> None:
        match verb:
            case Probe(request):
                rank.said["control"].append(self._state_of(rank, request))
            case Describe(request):
                rank.said["control"].append(Blueprint(request, b"groups"))
            case Pause(run):
                waits = rank.waits_in is not None
                state = StopState(run, False, waits, False, QUIET_MAX_S, ())
                rank.said["control"].append(state)
            case Interrupt(run) | Release(run):
                if rank.current is None or rank.current.run != run:
                    rank.cancelled.add(run)
                    return
                if rank.waits_in is not None:  # its connections are cut
                    self.cuts.add(rank.waits_in[:2])
                    rank.is_broken = True
                if rank.swallows and type(rank.current) is RunCell:
                    rank.waits_in = rank.until = None
                    if rank.steps and rank.steps[0][0] == FOREVER:
                        return
                    if rank.steps:
                        rank.steps.pop(0)
                else:
                    self._end(rank, _failure(run, type(verb) is Release))

    def _state_of(self, rank: SimulatedRank, request: int) -> RankState:
        run = rank.current.run if rank.current is not None else -1
        group = rank.waits_in[0] if rank.waits_in is not None else ""
        return RankState(
            request=request,
            run=run,
            execution_count=1,
            line=1,
            where="f",
            collective="all_reduce" if group else "",
            device="cpu",
            device_bytes=0,
            group=group,
            waited_s=self.now - rank.since if group else 0.0,
            is_broken=self._is_broken(rank),
            counts=_counts_of(rank, rank.groups),
            in_flight=(InFlight(group, "all_reduce", rank.waits_in[2]),) if rank.waits_in else (),
        )

    def _is_broken(self, rank: SimulatedRank) -> bool:
        """A cut is seen from both ends."""
        return rank.is_broken or any(
            (name, group.generation) in self.cuts and not group.is_down
            for name, group in rank.groups.items()
        )

    def _can_go_on(self, rank: SimulatedRank) -> bool:
        if rank.current is None:
            return any(not rank.holds_back or type(verb) in (Heal, Resume) for verb in rank.inbox)
        if type(rank.current) is Heal:
            return self._heal_is_complete(rank.current)
        if rank.until is not None:
            return rank.until <= self.now
        if rank.waits_in is not None:
            return self._is_met(rank.waits_in) or rank.waits_in[:2] in self.cuts
        return not (rank.steps and rank.steps[0][0] == FOREVER)

    def _go_on(self, rank: SimulatedRank) -> None:
        if rank.current is None:
            self._begin(rank)
        elif type(rank.current) is Heal:
            self._finish_heal(rank, rank.current)
        elif rank.waits_in is not None and not self._is_met(rank.waits_in):
            self._end(rank, Failed(rank.current.run, "RuntimeError", "connection closed", "", 1))
        elif not rank.steps:
            counts = _counts_of(rank, sorted(rank.touched))
            self._end(rank, Done(rank.current.run, None, counts))
        elif rank.waits_in is not None or rank.until is not None:
            rank.waits_in = rank.until = None
            rank.steps.pop(0)
        else:
            self._do_step(rank, rank.steps[0])

    def _begin(self, rank: SimulatedRank) -> None:
        index = next(
            i
            for i, verb in enumerate(rank.inbox)
            if not rank.holds_back or type(verb) in (Heal, Resume)
        )
        verb = rank.inbox[index]
        del rank.inbox[index]
        if type(verb) is Resume:
            rank.holds_back = False
            return
        rank.current = verb
        rank.steps, rank.touched, rank.swallows = [], set(), False
        if verb.run in rank.cancelled:
            self._end(rank, _failure(verb.run, True))
        elif type(verb) is Heal:
            self.arrived.setdefault(verb.run, set()).add(rank.rank)
        else:
            rank.steps = list(json.loads(verb.source).get(str(rank.rank), []))

    def _do_step(self, rank: SimulatedRank, step: Step) -> None:
        kind = step[0]
        run = rank.current.run
        match kind:
            case "collective" | "async":
                group = rank.groups.get(step[1])
                if group is None or group.is_down:
                    self._end(rank, Failed(run, "RuntimeError", "the group is down", "", 1))
                    return
                group.begun += 1
                rank.touched.add(step[1])
                place = (step[1], group.generation, group.begun)
                self._check_pair(place, rank.rank, run)
                if kind == COLLECTIVE:
                    rank.waits_in, rank.since = place, self.now
                else:
                    rank.steps.pop(0)
            case "compute":
                rank.until = self.now + step[1]
            case "fail":
                self._end(rank, Failed(run, "ValueError", "no", "", 1))
            case "die":
                self.kill(rank.rank)
            case "swallow":
                rank.swallows = True
                rank.steps.pop(0)

    def _check_pair(self, place: tuple[str, int, int], rank: int, run: int) -> None:
        """Only of runs that were in flight together may collectives meet."""
        met = self.pairs.setdefault(place, {})
        for other in met.values():
            first, second = sorted((other, run))
            ended = self.finished_at.get(first)
            assert ended is None or self.submitted_at[second] < ended, (
                f"a collective of run {second} met one of run {first}, which had ended: {place}"
            )
        met[rank] = run

    def _is_met(self, place: tuple[str, int, int]) -> bool:
        return set(self.members[place[0]]) <= self.pairs.get(place, {}).keys()

    def _end(self, rank: SimulatedRank, answer: Done | Failed) -> None:
        if type(rank.current) is Heal:
            self.heals.get(rank.current.run, set()).discard(rank.rank)
            if type(answer) is Failed:
                rank.is_broken = True
        if type(answer) is Failed:
            rank.holds_back = True
        elif type(rank.current) is Heal:
            rank.holds_back = False
        rank.current = rank.waits_in = rank.until = None
        rank.steps = []
        rank.said["work"].append(answer)

    def _heal_is_complete(self, heal: Heal) -> bool:
        return self.arrived.get(heal.run, set()) >= set(heal.ranks)

    def _finish_heal(self, rank: SimulatedRank, heal: Heal) -> None:
        if not rank.groups:
            rank.groups = self._groups_of(rank.rank, 0)
        for name, group in rank.groups.items():
            if group.generation != heal.generation:
                self.cuts.add((name, group.generation))
            if set(group.members) <= set(heal.ranks):
                group.generation, group.begun, group.is_down = heal.generation, 0, False
            else:
                group.is_down = True
        rank.is_broken = False
        self._end(rank, Done(heal.run))


def _counts_of(rank: SimulatedRank, names: Iterable[str]) -> tuple[GroupCount, ...]:
    return tuple(
        GroupCount(name, () if name == "world" else group.members, group.begun)
        for name, group in ((name, rank.groups[name]) for name in names)
    )


def _failure(run: int, is_release: bool) -> Failed:
    kind = "Released" if is_release else "KeyboardInterrupt"
    return Failed(run, kind, "", "", 0, released=is_release)
