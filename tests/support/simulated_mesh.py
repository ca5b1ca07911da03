"""A mesh of pretended ranks and their agent, for the controller's core to bring back from anything.

Ranks run programs, count collectives, wait for each other in them, hold back after a failure, heal
together, are silent for a while, and die. Every message waits until somebody delivers it, in any
order that sockets allow: what is said on one socket stays in order, and nothing else does.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellmesh.controller.core.core import Answer, Core, Effect, Finish, Send
from cellmesh.controller.run import WorkItem
from cellmesh.wire.attach import RunInfo, Welcome
from cellmesh.wire.codec import Parcel, at_rank_for_control, at_rank_for_work
from cellmesh.wire.groups import Blueprint, Describe, GroupCount, Heal
from cellmesh.wire.messages import (
    Died,
    Done,
    Failed,
    Interrupt,
    Kill,
    MeshReady,
    Progress,
    Ranked,
    Relay,
    Release,
    Respawn,
    Respawned,
    RespawnFailed,
    Restart,
    Resume,
    StoreDied,
)
from cellmesh.wire.status import Phase, Probe, RankInfo, RankState
from cellmesh.wire.stopping import QUIET_MAX_S, Pause, StopState
from cellmesh.wire.user_code import RunCell

Step = Sequence[Any]
# What a rank's part of a run may be made of.
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
class Rank:
    """One rank's process."""

    rank: int
    groups: dict[str, Group]
    inbox: collections.deque[Any] = field(default_factory=collections.deque)
    control: collections.deque[Any] = field(default_factory=collections.deque)
    said: dict[str, collections.deque[Any]] = field(
        default_factory=lambda: {"work": collections.deque(), "control": collections.deque()}
    )
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


class Simulation:
    """The mesh, its agent and the wires.

    Args:
        num_ranks: number of ranks.
        seed: decides in which order things happen.
        hangs_on_death: whether collectives hang that a dead rank had a part in, or raise.
        options: the core's.
    """

    def __init__(self, num_ranks: int, seed: int, hangs_on_death: bool, **options: Any) -> None:
        self.num_ranks = num_ranks
        self.random = random.Random(seed)
        self.hangs_on_death = hangs_on_death
        self.options = options
        self.now = 0.0
        self.core = Core(num_ranks, new_generation=self._new_generation, **options)
        self.members = {"world": tuple(range(num_ranks))}
        self.members |= {f"pair{i}": (i, i + 1) for i in range(0, num_ranks - 1, 2)}
        self.ranks: dict[int, Rank] = {}
        self.ups: collections.deque[Any] = collections.deque()  # agent -> controller
        self.downs: collections.deque[Parcel[Any]] = collections.deque()  # controller -> agent
        self.respawning: tuple[int, ...] = ()
        self.is_restarting = False
        self.fork_fails = False
        self.next_run = 1
        self.generations = 0
        self.submitted_at: dict[int, int] = {}  # run -> how many things had been seen then
        self.finished_at: dict[int, int] = {}
        self.num_seen = 0
        self.pairs: dict[tuple[str, int, int], dict[int, int]] = {}  # collective -> rank -> run
        self.unfinished: set[int] = set()
        self.open_requests: set[int] = set()
        self.reports: list[Any] = []
        self.heals: dict[int, set[int]] = {}  # run -> who has not ended it
        self.arrived: dict[int, set[int]] = {}  # heal's run -> who has come to it
        self.heals_sent: list[Heal] = []
        self.has_attached = False
        self.cuts: set[tuple[str, int]] = set()  # connections that are no more: group, generation
        self._hear(Welcome(2, 1, "host"))
        self._hear(Progress("forking ranks", 0))
        self._start_ranks()
        self._hear(MeshReady(self._infos()))

    # ---- the user

    def submit(self, ranks: Sequence[int], programs: dict[int, list[Step]]) -> int:
        run, self.next_run = self.next_run, self.next_run + 1
        self.num_seen += 1
        self.submitted_at[run] = self.num_seen
        self.unfinished.add(run)
        verb = RunCell(run, json.dumps(programs), "", False, 0)
        item = WorkItem(verb, RunCell, tuple(ranks), title="")
        self.carry_out(self.core.submit(item.relay(run), self.now))
        return run

    def interrupt(self, run: int) -> None:
        self.carry_out(self.core.interrupt(run, self.now))

    def heal(self) -> None:
        request, effects = self.core.heal(self.now)
        self.open_requests.add(request)
        self.carry_out(effects)

    def restart(self) -> None:
        self.carry_out(self.core.restart())

    def attach(self) -> None:
        """Another controller takes over; what the agent had said to the first is heard by it."""
        self.carry_out(self.core.agent_ended("taken over"))
        self.core = Core(self.num_ranks, new_generation=self._new_generation, **self.options)
        for parcel in list(self.downs):  # the agent has read those
            self._agent_obeys(self.downs.popleft())
            assert parcel is not None
        flights: dict[int, set[int]] = {}
        for rank in self.ranks.values():
            for verb in [rank.current, *rank.inbox]:
                if type(verb) is RunCell:
                    flights.setdefault(verb.run, set()).add(rank.rank)
            for verb in [verb for socket in rank.said.values() for verb in socket]:
                if type(verb) in (Done, Failed):
                    flights.setdefault(verb.run, set()).add(rank.rank)
        for verb in self.ups:
            if type(verb) is Ranked and type(verb.verb) in (Done, Failed):
                flights.setdefault(verb.verb.run, set()).update(verb.ranks)
        runs = tuple(
            RunInfo(run, tuple(sorted(ranks)), "")
            for run, ranks in flights.items()
            if run < 1 << 40
        )
        self.unfinished = {info.run for info in runs}
        for info in runs:
            self.finished_at.pop(info.run, None)
        self.has_attached = True
        held = [
            verb
            for verb in self.ups
            if type(verb) is not MeshReady and not (type(verb) is Died and verb.rank in self.ranks)
        ]  # the state is told anew, and who died and was replaced is not dead
        ready = any(type(verb) is MeshReady for verb in self.ups) or not self.is_restarting
        self.ups.clear()
        self._hear(Welcome(2, 1, "host", next_run=self.next_run, runs=runs))
        if ready:
            self._hear(MeshReady(self._infos()))
        self.ups.extend(held)

    # ---- what happens by itself

    def kill(self, rank: int) -> None:
        """A rank's process ends; the agent hears its last words first."""
        dying = self.ranks.pop(rank, None)
        if dying is None:
            return
        for socket in dying.said.values():
            for verb in socket:
                self.ups.append(Ranked((rank,), verb))
        for left in self.heals.values():
            left.discard(rank)
        for name, group in dying.groups.items():
            if not self.hangs_on_death:
                self.cuts.add((name, group.generation))
        if self.is_restarting:
            return
        if rank in self.respawning:
            ranks, self.respawning = self.respawning, ()
            for other in ranks:
                self.ranks.pop(other, None)
                for left in self.heals.values():
                    left.discard(other)
            self.ups.append(RespawnFailed(ranks, f"rank {rank} was killed"))
        else:
            self.ups.append(Died(rank, "was killed", ""))

    def silence(self, rank: int, seconds: float) -> None:
        if rank in self.ranks:
            self.ranks[rank].silent_until = self.now + seconds

    def lose_store(self, port: int) -> None:
        if not self.is_restarting:
            self.ups.append(StoreDied("was killed", port))

    def choices(self) -> list[Any]:
        """Everything that could happen next without time passing."""
        found: list[Any] = []
        if self.ups:
            found.append(self._controller_hears)
        if self.downs:
            found.append(lambda: self._agent_obeys(self.downs.popleft()))
        if self.respawning and all(rank in self.ranks for rank in self.respawning):
            found.append(self._respawned)
        if self.is_restarting:
            found.append(self._restarted)
        for rank in self.ranks.values():
            for socket in rank.said.values():
                if socket:
                    found.append(
                        lambda r=rank, s=socket: self.ups.append(Ranked((r.rank,), s.popleft()))
                    )
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

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and all that happens in it."""
        end = self.now + seconds
        num_still = 0
        self.happen()
        while True:
            times = [self.core.deadline()]
            times += [rank.until for rank in self.ranks.values()]
            times += [
                r.silent_until
                for r in self.ranks.values()
                if r.control and r.silent_until > self.now
            ]
            at = min((at for at in times if at is not None), default=end)
            if at > end:
                break
            num_still = num_still + 1 if at <= self.now else 0
            assert num_still < 20, f"due at {at} for ever, at {self.now}"
            self.now = max(self.now, at)
            self.carry_out(self.core.tick(self.now))
            self.happen()
            if at >= end:
                break
        self.now = max(self.now, end)

    # ---- the controller's side

    def carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(parcel):
                    self._check_sent(parcel)
                    self.downs.append(parcel)
                case Finish(run):
                    assert run in self.unfinished, f"run {run} finishes twice"
                    self.unfinished.discard(run)
                    self.num_seen += 1
                    self.finished_at[run] = self.num_seen
                case Answer(request, value):
                    self.open_requests.discard(request)
                    self.reports.append(value)

    def _check_sent(self, parcel: Parcel[Any]) -> None:
        relay = parcel.verb
        if type(relay) is not Relay:
            return
        assert relay.ranks, "a message to nobody"
        assert not set(relay.ranks) & self.core.dead.keys(), f"sent to the dead: {relay}"
        codec = at_rank_for_work() if relay.channel == "work" else at_rank_for_control()
        for verb, _ in codec.decode(parcel.buffers):
            if type(verb) is RunCell:
                assert verb.run in self.unfinished, f"run {verb.run} is sent and has ended"
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
            runs = [verb.run for verb in [state.current, *state.inbox] if type(verb) is RunCell]
            waiting = [run for run in runs if run not in state.cancelled]
            assert state.holds_back or not waiting, (
                f"rank {rank} is to heal and has {waiting} to run"
            )
            if not state.groups:
                old = [r for r in heal.ranks if r in self.ranks and self.ranks[r].groups]
                assert heal.blueprint or not old, (heal, old)

    def _controller_hears(self) -> None:
        self.carry_out(self.core.receive(Parcel(self.ups.popleft()), self.now))

    def _hear(self, verb: Any) -> None:
        self.carry_out(self.core.receive(Parcel(verb), self.now))

    # ---- the agent

    def _agent_obeys(self, parcel: Parcel[Any]) -> None:
        order = parcel.verb
        match order:
            case Relay():
                for rank in order.ranks:
                    if rank in self.ranks and not self.is_restarting:
                        socket = (
                            self.ranks[rank].inbox
                            if order.channel == "work"
                            else self.ranks[rank].control
                        )
                        codec = (
                            at_rank_for_work() if order.channel == "work" else at_rank_for_control()
                        )
                        socket.extend(verb for verb, _ in codec.decode(parcel.buffers))
            case Kill():
                for rank in order.ranks:
                    self.kill(rank)
            case Respawn():
                dead = tuple(rank for rank in order.ranks if rank not in self.ranks)
                if self.is_restarting:
                    return
                if self.fork_fails or not dead or self.respawning:
                    self.ups.append(RespawnFailed(order.ranks, "cannot fork"))
                else:
                    self.respawning = dead
                    self.ranks |= {rank: Rank(rank, {}) for rank in dead}
            case Restart():
                self.respawning, self.is_restarting = (), True
                for rank in list(self.ranks):
                    self.kill(rank)

    def _respawned(self) -> None:
        ranks, self.respawning = self.respawning, ()
        infos = tuple(info for info in self._infos() if info.rank in ranks)
        self.ups.append(Respawned(infos))

    def _restarted(self) -> None:
        self.is_restarting = False
        self.heals.clear()
        self._start_ranks()
        self.ups.append(MeshReady(self._infos()))

    def _start_ranks(self) -> None:
        self.generations += 1
        self.ranks = {
            rank: Rank(rank, self._groups_of(rank, self.generations))
            for rank in range(self.num_ranks)
        }

    def _infos(self) -> tuple[RankInfo, ...]:
        return tuple(
            RankInfo(rank, rank + 1, "host", self._phase(rank)) for rank in range(self.num_ranks)
        )

    def _phase(self, rank: int) -> Phase:
        if rank in self.respawning:
            return "starting"
        return "idle" if rank in self.ranks else "dead"

    def _groups_of(self, rank: int, generation: int) -> dict[str, Group]:
        return {
            name: Group(members, generation)
            for name, members in self.members.items()
            if rank in members
        }

    def _new_generation(self) -> int:
        self.generations += 1
        return self.generations

    # ---- a rank

    def _obey_control(self, rank: Rank, verb: Any) -> None:
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

    def _state_of(self, rank: Rank, request: int) -> RankState:
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
        )

    def _is_broken(self, rank: Rank) -> bool:
        """A cut is seen from both ends."""
        return rank.is_broken or any(
            (name, group.generation) in self.cuts and not group.is_down
            for name, group in rank.groups.items()
        )

    def _can_go_on(self, rank: Rank) -> bool:
        if rank.current is None:
            return any(not rank.holds_back or type(verb) in (Heal, Resume) for verb in rank.inbox)
        if type(rank.current) is Heal:
            return self._heal_is_complete(rank.current)
        if rank.until is not None:
            return rank.until <= self.now
        if rank.waits_in is not None:
            return self._is_met(rank.waits_in) or rank.waits_in[:2] in self.cuts
        return not (rank.steps and rank.steps[0][0] == FOREVER)

    def _go_on(self, rank: Rank) -> None:
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

    def _begin(self, rank: Rank) -> None:
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

    def _do_step(self, rank: Rank, step: Step) -> None:
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
        name, generation, number = place
        met = self.pairs.get(place, {})
        assert number > 0
        assert generation > 0
        return set(self.members[name]) <= met.keys()

    def _end(self, rank: Rank, answer: Done | Failed) -> None:
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

    def _finish_heal(self, rank: Rank, heal: Heal) -> None:
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


def _counts_of(rank: Rank, names: Iterable[str]) -> tuple[GroupCount, ...]:
    return tuple(
        GroupCount(name, () if name == "world" else group.members, group.begun)
        for name, group in ((name, rank.groups[name]) for name in names)
    )


def _failure(run: int, is_release: bool) -> Failed:
    kind = "Released" if is_release else "KeyboardInterrupt"
    return Failed(run, kind, "", "", 0, released=is_release)
