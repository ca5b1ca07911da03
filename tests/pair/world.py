"""Controller and agent in one process: what decides on both sides, with the wire's bytes between them.

`World` does what the link does on one side and the agent's shell on the other, without sockets, processes or
time of its own. What is sent waits until it is delivered, so that a test can let messages cross.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Sequence
from typing import Any

from cellmesh.controller.core import Answer, Change, Core, Deliver, Effect, Finish, Send, Waits, encode_work
from cellmesh.controller.printer import Printer
from cellmesh.controller.run import Run
from cellmesh.controller.sinks import ConsoleSink
from cellmesh.wire import payload
from cellmesh.wire.framing import (
    Frame,
    Parcel,
    at_agent_from_controller,
    at_agent_from_rank,
    at_controller,
    at_rank_for_control,
    at_rank_for_work,
    encode,
)
from cellmesh.wire.messages import (
    Died,
    Display,
    Done,
    Failed,
    HostReport,
    Interrupt,
    Leave,
    Output,
    Peek,
    Probe,
    PullNames,
    RankReady,
    RankState,
    ReadHost,
    Relay,
    Restart,
    Stop,
)
from cellmesh.workers.supervisor import AskToLeave, End, ForkAll, KillRanks, Supervisor, ToRanks, Up

Frames = Sequence[Frame]


class ScriptedRank:
    """A rank's process, which says what a test has it say about the first of its runs."""

    def __init__(self, world: World, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self.queue: collections.deque[int] = collections.deque()
        self.interrupted: set[int] = set()
        self.collective = ""
        self.answers_probes = True
        self.is_doomed = False
        self.was_asked_to_leave = False
        self._world = world

    def ready(self) -> None:
        self._say(RankReady("cpu", "gloo"))

    def print(self, text: str, stream: Any = "stdout") -> None:
        self._say(Output(self.queue[0], stream, text))

    def display(self, bundle: bytes) -> None:
        self._say(Display(self.queue[0], "display", bundle))

    def done(self, value: Any = None) -> None:
        """Answer the first run with a value."""
        run = self.queue.popleft()
        if value is None:
            self._say(Done(run))
            return
        pickled, buffers = payload.dumps(value, "value")
        self._say(Done(run, pickled), buffers)

    def fail(self, error: BaseException, line: int = 1) -> None:
        """Answer the first run with an exception."""
        run = self.queue.popleft()
        kind = type(error).__name__
        pickled, buffers = payload.dumps(error, "error")
        self._say(Failed(run, kind, str(error), f"{kind}: {error}", line, pickled), buffers)

    def obey(self) -> None:
        """Answer the first run as an interrupted rank does."""
        self.fail(KeyboardInterrupt("interrupted in sleep"))

    def die(self, reason: str = "killed by SIGKILL", last_output: str = "") -> None:
        """End the process."""
        self._world.reap(self.rank, reason, last_output)

    def write_below_python(self, text: str) -> None:
        """Write to descriptor 2."""
        self._world.act(self._world.supervisor.from_pipe(self.rank, "stderr", text, self._world.now))

    # ---- what reaches it

    def hear_work(self, frames: Frames) -> None:
        for verb, _ in at_rank_for_work().decode(frames):
            self.queue.append(verb.run)

    def hear_control(self, frames: Frames) -> None:
        for verb, _ in at_rank_for_control().decode(frames):
            match verb:
                case Probe(request):
                    if self.answers_probes:
                        run = self.queue[0] if self.queue else -1
                        busy = run >= 0
                        collective = self.collective if busy else ""
                        self._say(
                            RankState(
                                request, run, 1 if busy else 0, 5 if busy else 0, "m.f", collective, "cpu", 0
                            )
                        )
                case Interrupt(run):
                    self.interrupted.add(run)
                case Peek(run, expression):
                    pickled, buffers = payload.dumps(f"{expression} on {self.rank}", "peek")
                    self._say(Done(run, pickled), buffers)
                case Leave():
                    self.was_asked_to_leave = True

    def _say(self, verb: Any, buffers: Frames = ()) -> None:
        self._world.hear_rank(self.rank, encode([Parcel(verb, tuple(buffers))]))


class World:
    """A mesh whose every part is here.

    Attributes:
        now: what all clocks say.
        ranks: rank -> its process, as long as it lives.
        changes: what the mesh's owner was told.
        ended: how often the agent ended.
    """

    def __init__(self, num_ranks: int, backend: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self.now = 100.0
        self.core = Core(num_ranks)
        self.supervisor = Supervisor(num_ranks, backend, "host", self.now)
        self.ranks: dict[int, ScriptedRank] = {}
        self.changes: list[Change] = []
        self.answers: dict[int, Any] = {}
        self.runs: dict[int, Run[Any]] = {}
        self.texts: dict[int, io.StringIO] = {}
        self.finished: collections.Counter[int] = collections.Counter()
        self.settled: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        self.ended = 0
        self.num_up = 0
        self._incarnation = 0
        self._in_flight: set[int] = set()
        self._to_agent: collections.deque[list[Frame]] = collections.deque()
        self._to_controller: collections.deque[list[Frame]] = collections.deque()

    # ---- life

    def import_torch(self, num_gpus: int = 0) -> None:
        """The zygote is ready."""
        self.act(self.supervisor.zygote_ready(num_gpus))
        self.deliver()

    def start(self) -> World:
        """Bring it up."""
        self._to_controller.append(encode([self.supervisor.progress()]))
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
        self._carry_out(self.core.restart({"dp": self.num_ranks}))

    def stop(self) -> None:
        """As the user asks."""
        self._carry_out(self.core.stop())

    def reap(self, rank: int, reason: str = "killed by SIGKILL", last_output: str = "") -> None:
        """A rank's process has ended."""
        del self.ranks[rank]
        self.act(self.supervisor.rank_ended(rank, reason, last_output, self.now))

    def reap_doomed(self) -> None:
        """Every process that was killed or asked to leave has ended."""
        for rank, process in list(self.ranks.items()):
            if process.is_doomed or process.was_asked_to_leave:
                self.reap(rank)
        self.deliver()

    def lose_agent(self) -> None:
        """The agent's process ends, and all others with it."""
        self.ranks.clear()
        self._to_controller.clear()
        self._carry_out(self.core.agent_ended("its agent's process ended"))

    # ---- runs

    def submit(self, ranks: Sequence[int] | None = None, single: bool = False) -> Run[Any]:
        """Start a run; what it is to do is up to the scripted ranks."""
        return self._start(ranks, single, "work", lambda number: PullNames(number, "x"))

    def peek(self, ranks: Sequence[int]) -> Run[Any]:
        """Start a run that control threads answer."""
        return self._start(ranks, False, "control", lambda number: Peek(number, "x"))

    def text_of(self, run: Run[Any]) -> str:
        """All that a run has shown so far."""
        return self.texts[run.number].getvalue()

    def ask_states(self, ranks: Sequence[int]) -> int:
        """Ask what ranks are doing; the answer comes to `answers`."""
        request, effects = self.core.ask_states(ranks, self.now)
        self._carry_out(effects)
        return request

    def ask_host(self) -> int:
        """Ask for the agent's report; the answer comes to `answers`."""
        request, effects = self.core.ask_host()
        self._carry_out(effects)
        return request

    def _start(
        self, ranks: Sequence[int] | None, single: bool, channel: Any, verb: Callable[[int], Any]
    ) -> Run[Any]:
        number = len(self.runs) + 1
        chosen = tuple(range(self.num_ranks) if ranks is None else ranks)
        text = self.texts[number] = io.StringIO()
        printer = Printer(chosen, ConsoleSink(text, text))
        run: Run[Any] = Run(number, chosen, single, printer, lambda: self._interrupt(number), f"run {number}")
        self.runs[number] = run
        self._in_flight.add(number)
        self._carry_out(self.core.submit(number, chosen, encode_work(verb(number)), channel))
        return run

    def _interrupt(self, number: int) -> None:
        self._carry_out(self.core.interrupt(number))

    # ---- time and messages

    def deliver(self) -> None:
        """Deliver messages, both ways, until none is under way and nothing is due."""
        while True:
            if self.deliver_down() or self.deliver_up():
                continue
            before = len(self._to_agent), len(self._to_controller)
            self.tick()
            if (len(self._to_agent), len(self._to_controller)) == before:
                return

    def deliver_down(self) -> bool:
        """Deliver one message to the agent; whether there was one."""
        if not self._to_agent:
            return False
        self._hear_controller(self._to_agent.popleft())
        return True

    def deliver_up(self) -> bool:
        """Deliver one message to the controller; whether there was one."""
        if not self._to_controller:
            return False
        for parcel in at_controller().decode(self._to_controller.popleft()):
            self._carry_out(self.core.receive(parcel, self.now))
        return True

    def tick(self) -> None:
        """Let both sides do what is due now."""
        self.act(self.supervisor.tick(self.now))
        self._carry_out(self.core.tick(self.now))
        for run in self.runs.values():
            due = run.printer.deadline()
            if due is not None and due <= self.now:
                run.printer.show(self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps from one deadline to the next."""
        until = self.now + seconds
        self.deliver()
        while True:
            printers = [run.printer.deadline() for run in self.runs.values()]
            deadlines = [self.core.deadline(), self.supervisor.deadline(), *printers]
            due = [at for at in deadlines if at is not None]
            if not due or min(due) > until:
                break
            assert min(due) >= self.now - 1e-9 or min(due) == 0.0, "something stays due"
            self.now = max(self.now, min(due))
            self.deliver()
        self.now = until

    # ---- the agent's shell

    def act(self, actions: Sequence[Any]) -> None:
        """Carry out what the supervisor decided."""
        for action in actions:
            match action:
                case Up(parcels):
                    self.num_up += 1
                    self._to_controller.append(encode(parcels))
                case ToRanks(ranks, channel, frames):
                    for rank in ranks:
                        if rank in self.ranks:
                            self._pass_on(self.ranks[rank], channel, frames)
                case ForkAll():
                    self._fork_all()
                case KillRanks(ranks):
                    for rank in ranks:
                        if rank in self.ranks:
                            self.ranks[rank].is_doomed = True
                case AskToLeave(ranks):
                    for rank in ranks:
                        self.ranks[rank].hear_control(encode([Parcel(Leave())]))
                case End():
                    assert not self.ranks
                    self.ended += 1

    def hear_rank(self, rank: int, frames: Frames) -> None:
        """A rank said something."""
        for parcel in at_agent_from_rank().decode(frames):
            self.act(self.supervisor.from_rank(rank, parcel, self.now))

    def _pass_on(self, rank: ScriptedRank, channel: str, frames: Frames) -> None:
        if channel == "work":
            rank.hear_work(frames)
        else:
            rank.hear_control(frames)

    def _fork_all(self) -> None:
        assert not self.ranks, "forked beside living ranks"
        self._incarnation += 1
        for rank in range(self.num_ranks):
            self.ranks[rank] = ScriptedRank(self, rank, 1000 * self._incarnation + rank)
        self.act(self.supervisor.forked({rank: process.pid for rank, process in self.ranks.items()}))

    def _hear_controller(self, frames: Frames) -> None:
        for verb, buffers in at_agent_from_controller().decode(frames):
            match verb:
                case Relay():
                    self.act(self.supervisor.relay(verb, buffers))
                case Restart():
                    self.act(self.supervisor.restart())
                case Stop():
                    self.act(self.supervisor.stop("stopped", self.now))
                case ReadHost(request):
                    self.act([Up([Parcel(HostReport(request, self.supervisor.report({})))])])

    # ---- the link

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        outgoing = [effect.parcel for effect in effects if type(effect) is Send]
        if outgoing:
            self._to_agent.append(encode(outgoing))
        for effect in effects:
            match effect:
                case Deliver(number, ranks, parcel):
                    self._deliver_to_run(number, ranks, parcel)
                case Finish(number):
                    self._in_flight.remove(number)
                    self.finished[number] += 1
                    self.runs[number].finish(self.now)
                case Waits(number, states):
                    assert number in self._in_flight
                    self.runs[number].report_waiting(states)
                case Answer(request, value):
                    assert request not in self.answers, "answered twice"
                    self.answers[request] = value
                case Change():
                    self.changes.append(effect)

    def _deliver_to_run(self, number: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        if type(parcel.verb) in (Done, Failed, Died):
            assert number in self._in_flight
            self.settled[number] += ranks
            self.runs[number].settle(ranks, parcel, self.now)
        else:
            self.runs[number].printer.feed(ranks, parcel.verb, self.now)
