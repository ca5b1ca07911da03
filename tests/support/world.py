"""Controller and agent in one process: what decides on both sides, with the wire's bytes between
them.

`BothSides` does what the link does on one side and the agent's shell on the other, without sockets,
processes or time of its own. What is sent waits until it is delivered, so that a test can let
messages cross. Its ranks do what a test has them do (`scripted.World`), or run programs and are
delivered to in any order (`simulated_mesh.Simulation`).
"""

from __future__ import annotations

import collections
import io
import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from cellmesh.controller.core.core import (
    Answer,
    Change,
    Core,
    Deliver,
    Effect,
    Finish,
    Judge,
    Note,
    Send,
    Watch,
)
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.run import Run, WorkItem
from cellmesh.wire.attach import Welcome
from cellmesh.wire.codec import (
    Frame,
    Parcel,
    at_agent_from_controller,
    at_controller,
    encode,
)
from cellmesh.wire.messages import (
    Channel,
    Died,
    Done,
    Failed,
    Kill,
    Relay,
    Respawn,
    Restart,
    Stop,
    Stopped,
)
from cellmesh.wire.peer_calls import PEER_RUNS, PeerWork
from cellmesh.wire.status import HostReport, Probe, ReadHost
from cellmesh.workers.agent.spool import Spool
from cellmesh.workers.agent.supervisor import Fork, KillRanks, Supervisor, ToRanks, Up

from .runs import FakeControl, work_item

Frames = Sequence[Frame]


class Rank(Protocol):
    """A rank's process, for its agent."""

    pid: int
    is_doomed: bool
    was_asked_to_leave: bool

    def ready(self) -> None: ...

    def hear_work(self, frames: Frames) -> None: ...

    def hear_control(self, frames: Frames) -> None: ...


RankKind = TypeVar("RankKind", bound=Rank)


class BothSides(Generic[RankKind]):
    """A mesh whose every part is here.

    Attributes:
        now: what all clocks say.
        ranks: rank -> its process, as long as it lives.
        changes: what the mesh's owner was told.
        ended: how often the agent ended.
    """

    def __init__(self, num_ranks: int, backend: str = "gloo", **options: Any) -> None:
        self.num_ranks = num_ranks
        self.now = 100.0
        self._options = options
        self.core = Core(num_ranks, **options)
        self.supervisor = Supervisor(range(num_ranks), backend, "host", self.now)
        self.ranks: dict[int, RankKind] = {}
        self.changes: list[Change] = []
        self.answers: dict[int, Any] = {}
        self.runs: dict[int, Run[Any]] = {}
        self.texts: dict[int, io.StringIO] = {}
        self.finished: collections.Counter[int] = collections.Counter()
        self.settled: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        self.ended = 0
        self.num_up = 0
        self.notes: list[str] = []
        self.is_attached = True
        self.spool = Spool()
        self._num_forks = 0
        self._num_controllers = 0
        self.in_flight: set[int] = set()
        self.to_agent: collections.deque[list[Frame]] = collections.deque()
        self.to_controller: collections.deque[list[Frame]] = collections.deque()

    # ---- life

    def import_torch(self, num_gpus: int = 0) -> None:
        """The zygote is ready."""
        self.act(self.supervisor.zygote_ready(num_gpus))
        self.deliver()

    def start(self) -> Self:
        """Bring it up."""
        self.greet()
        self.import_torch()
        self.get_ready()
        assert self.core.state == "ready"
        return self

    def get_ready(self) -> None:
        """Every rank has its process group."""
        for rank in list(self.ranks):
            self.ranks[rank].ready()
        self.deliver()

    def restart(self) -> None:
        """As the user asks; the ranks are then doomed, and live until they are reaped."""
        self.carry_out(self.core.restart({"dp": self.num_ranks}))

    def heal(self) -> int:
        """As the user asks; the answer comes to `answers`."""
        request, effects = self.core.heal(self.now)
        self.carry_out(effects)
        return request

    def leave(self) -> None:
        """The controller's process ends; what is under way to it is lost, and from it as well."""
        unacked = [list(at_controller().decode(frames)) for frames in self.to_controller]
        self.to_agent.clear()
        self.to_controller.clear()
        self.is_attached = False
        self.spool.leave(unacked)

    def attach(self) -> Welcome:
        """Another controller comes, and has the runs in flight."""
        self._num_controllers += 1
        last_request = self._num_controllers << 20
        self.core = Core(self.num_ranks, last_request=last_request, **self._options)
        self.runs, self.in_flight, self.answers = {}, set(), {}
        self.finished.clear()
        self.settled.clear()
        return self.greet()

    def greet(self) -> Welcome:
        """The agent accepts a controller."""
        welcome = Welcome(2, 1, "host", 0, self.spool.next_run, self.spool.runs(), away_s=1.0)
        for info in welcome.runs:
            self._add_run(info.run, work_item(info.ranks, f"run {info.run}"))
        self.carry_out(self.core.receive(Parcel(welcome), self.now))
        self.spool.attend(self.supervisor.progress(), self.supervisor.deaths())
        self.is_attached = True
        while self.spool:
            self.to_controller.append(encode(self.spool.take()))
        return welcome

    def stop(self) -> None:
        """As the user asks."""
        self.carry_out(self.core.stop())

    def reap(self, rank: int, reason: str = "killed by SIGKILL", last_output: str = "") -> None:
        """A rank's process has ended."""
        del self.ranks[rank]
        self.act(self.supervisor.rank_ended(rank, reason, last_output, self.now))

    def write_below_python(self, rank: int, text: str) -> None:
        """A rank's process writes to descriptor 2."""
        self.act(self.supervisor.from_pipe(rank, "stderr", text, self.now))

    def reap_doomed(self) -> None:
        """Every process that was killed or asked to leave has ended."""
        for rank, process in list(self.ranks.items()):
            if process.is_doomed or process.was_asked_to_leave:
                self.reap(rank)
        self.deliver()

    def lose_agent(self) -> None:
        """The agent's process ends, and all others with it."""
        self.ranks.clear()
        self.to_controller.clear()
        self.carry_out(self.core.agent_ended("its agent's process ended"))

    # ---- runs

    def text_of(self, run: Run[Any]) -> str:
        """All that a run has shown so far."""
        return self.texts[run.number].getvalue()

    def ask_states(self, ranks: Sequence[int]) -> int:
        """Ask what ranks are doing; the answer comes to `answers`."""
        request, effects = self.core.ask(ranks, Probe, self.now)
        self.carry_out(effects)
        return request

    def ask_host(self) -> int:
        """Ask for the agent's report; the answer comes to `answers`."""
        request, effects = self.core.ask_agent(ReadHost)
        self.carry_out(effects)
        return request

    def begin(self, verb: Any, ranks: Sequence[int], channel: Channel = "work") -> Run[Any]:
        """Start a run."""
        own = [number for number in self.runs if number not in PEER_RUNS]
        number = max(own, default=self.spool.next_run - 1) + 1
        title, waits = f"run {number}", verb.interleaves
        item = WorkItem(
            verb, type(verb), tuple(ranks), title=title, channel=channel, interleaves=waits
        )
        run = self._add_run(number, item)
        self.carry_out(self.core.submit(item.relay(number), self.now))
        return run

    def _add_run(self, number: int, item: WorkItem) -> Run[Any]:
        text = self.texts[number] = io.StringIO()
        printer = Printer(item.ranks, ConsoleSink(text, text))
        run: Run[Any] = Run(number, item, printer, FakeControl(lambda: self._interrupt(number)))
        self.runs[number] = run
        self.in_flight.add(number)
        return run

    def _interrupt(self, number: int) -> None:
        self.carry_out(self.core.interrupt([number], self.now))

    # ---- time and messages

    def deliver(self) -> None:
        """Deliver messages, both ways, until none is under way and nothing is due."""
        while True:
            if self.deliver_down() or self.deliver_up():
                continue
            before = len(self.to_agent), len(self.to_controller)
            self.tick()
            if (len(self.to_agent), len(self.to_controller)) == before:
                return

    def deliver_down(self) -> bool:
        """Deliver one message to the agent; whether there was one."""
        if not self.to_agent:
            return False
        self._hear_controller(self.to_agent.popleft())
        return True

    def deliver_up(self) -> bool:
        """Deliver one message to the controller; whether there was one."""
        if not self.to_controller:
            return False
        parcels = at_controller().decode(self.to_controller.popleft())
        self.spool.acked(parcels)
        for parcel in parcels:
            self.carry_out(self.core.receive(parcel, self.now))
        return True

    def tick(self) -> None:
        """Let both sides do what is due now."""
        self.act(self.supervisor.tick(self.now))
        if self.is_attached:
            self.carry_out(self.core.tick(self.now))
        for run in self.runs.values():
            due = run.printer.deadline()
            if due is not None and due <= self.now:
                run.printer.show(self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps from one deadline to the next."""
        until = self.now + seconds
        self.deliver()
        while True:
            due = self.deadline()
            if due > until:
                break
            assert due >= self.now - 1e-9 or due == 0.0, "something stays due"
            self.now = max(self.now, due)
            self.deliver()
        self.now = until

    def deadline(self) -> float:
        """Return when `tick` has something to do next."""
        deadlines = [run.printer.deadline() for run in self.runs.values()]
        deadlines += [self.supervisor.deadline()]
        deadlines += [self.core.deadline() if self.is_attached else None]
        return min((at for at in deadlines if at is not None), default=math.inf)

    # ---- the agent's shell

    def act(self, actions: Sequence[Any]) -> None:
        """Carry out what the supervisor decided."""
        for action in actions:
            match action:
                case Up(parcels):
                    self.num_up += 1
                    if any(type(parcel.verb) is Stopped for parcel in parcels):
                        assert not self.ranks
                        self.ended += 1
                    if self.is_attached:
                        self.to_controller.append(encode(parcels))
                    else:
                        self.spool.add(parcels)
                case ToRanks(ranks, channel, frames):
                    for rank in ranks:
                        if rank in self.ranks:
                            self._pass_on(self.ranks[rank], channel, frames)
                case Fork():
                    self._fork(action)
                case KillRanks(ranks):
                    for rank in ranks:
                        if rank in self.ranks:
                            self.ranks[rank].is_doomed = True

    def _pass_on(self, rank: RankKind, channel: str, frames: Frames) -> None:
        if channel == "work":
            rank.hear_work(frames)
        else:
            rank.hear_control(frames)

    def _fork(self, order: Fork) -> None:
        assert not self.ranks.keys() & set(order.ranks), "forked beside living ranks"
        self._num_forks += 1
        for rank in order.ranks:
            self.ranks[rank] = self._new_rank(order, rank, 1000 * self._num_forks + rank)
        self.act(self.supervisor.forked({rank: self.ranks[rank].pid for rank in order.ranks}))

    def _new_rank(self, order: Fork, rank: int, pid: int) -> RankKind:
        """Return a rank's process that the zygote has forked on this order."""
        raise NotImplementedError

    def _hear_controller(self, frames: Frames) -> None:
        for verb, buffers in at_agent_from_controller().decode(frames):
            match verb:
                case Relay():
                    self.spool.begin(verb)
                    self.act(self.supervisor.relay(verb, buffers))
                case Restart():
                    self.spool.forget_runs()
                    self.act(self.supervisor.restart())
                case Respawn(ranks):
                    self.act(self.supervisor.respawn(ranks, self.now))
                case Kill(ranks):
                    self.act(self.supervisor.kill(ranks))
                case Stop():
                    self.act(self.supervisor.stop("stopped", self.now))
                case ReadHost(request):
                    self.act([Up([Parcel(HostReport(request, self.supervisor.report({})))])])

    # ---- the link

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out what the core decided."""
        outgoing = [effect.parcel for effect in effects if type(effect) is Send]
        if outgoing:
            self.to_agent.append(encode(outgoing))
        for effect in effects:
            match effect:
                case Deliver(number, ranks, parcel, has_begun):
                    self._deliver_to_run(number, ranks, parcel, has_begun)
                case Finish(number):
                    self.in_flight.remove(number)
                    self.finished[number] += 1
                    self.runs[number].finish(self.now)
                case Watch(number, states):
                    assert number in self.in_flight
                    self.runs[number].show_live(states, self.now)
                case Judge(number, text):
                    self.runs[number].note_verdict(text)
                case Note(number, text):
                    self.notes.append(text)
                    self.runs[number].printer.note(text, self.now)
                case Answer(request, value):
                    assert request not in self.answers, "answered twice"
                    self.answers[request] = value
                case Change():
                    self.changes.append(effect)

    def _deliver_to_run(
        self, number: int, ranks: tuple[int, ...], parcel: Parcel[Any], has_begun: bool
    ) -> None:
        if type(parcel.verb) in (Done, Failed, Died):
            assert number in self.in_flight
            self.settled[number] += ranks
            self.runs[number].settle(ranks, parcel, self.now, has_begun)
        elif type(parcel.verb) is PeerWork:
            if number not in self.in_flight:
                self._add_run(number, work_item((), parcel.verb.title))
            self.runs[number].ranks += ranks
        elif number in self.runs:
            self.runs[number].printer.feed(ranks, parcel.verb, self.now)
