"""What the controller decides: pure, without sockets, threads or clocks.

`Core` knows the mesh's state, which ranks each run still waits for, and which questions are open. Its methods
take what happened, with the time, and return effects for the link to carry out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..wire.framing import Frame, Parcel, encode
from ..wire.messages import (
    Channel,
    Control,
    Died,
    Display,
    Done,
    Failed,
    HostReport,
    Interrupt,
    LogText,
    MeshReady,
    Output,
    Peek,
    Probe,
    Progress,
    Ranked,
    RankInfo,
    RankState,
    ReadHost,
    ReadLog,
    Refused,
    Relay,
    Restart,
    Skipped,
    StartFailed,
    Stop,
    Stopped,
    StoreDied,
    Welcome,
    Work,
)

# After a rank fails, how long the others may take before the user is told where they are.
REPORT_AFTER_S = 0.3
# A rank whose control thread cannot get a word in is reported without its state.
ANSWER_S = 1.0

State = Literal["connecting", "starting", "ready", "restarting", "stopping", "ended"]


@dataclass(frozen=True)
class Send:
    """Send to the agent."""

    parcel: Parcel[Any]


@dataclass(frozen=True)
class Deliver:
    """Hand a run what some of its ranks said (or, with `Died`, what became of them)."""

    run: int
    ranks: tuple[int, ...]
    parcel: Parcel[Any]


@dataclass(frozen=True)
class Waits:
    """Tell a run's user where its other ranks are, after one failed."""

    run: int
    states: dict[int, RankState]


@dataclass(frozen=True)
class Finish:
    """Every rank of the run has ended it."""

    run: int


@dataclass(frozen=True)
class Answer:
    """A question is answered, as far as it will be."""

    request: int
    value: Any


@dataclass(frozen=True)
class Change:
    """The mesh's state changed, or a start made progress."""

    state: State
    cause: Any


Effect = Send | Deliver | Waits | Finish | Answer | Change


@dataclass
class _Pending:
    ranks: set[int]
    report_at: float | None = None


@dataclass
class _Question:
    ranks: set[int]
    deadline: float
    answers: dict[int, RankState] = field(default_factory=dict)
    about_run: int = -1


class Core:
    """Decides for one mesh.

    Args:
        num_ranks: number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.state: State = "connecting"
        self.ranks: tuple[RankInfo, ...] = ()
        self.dead: dict[int, Died] = {}
        self._pending: dict[int, _Pending] = {}
        self._questions: dict[int, _Question] = {}
        self._next_request = 0

    # ---- what the user asks for

    def submit(
        self, run: int, ranks: Sequence[int], frames: Sequence[Frame], channel: Channel = "work"
    ) -> list[Effect]:
        """Send work to ranks.

        Args:
            run: a number not used before.
            ranks: who is to do it.
            frames: the encoded work.
            channel: ``control`` for what is answered while the rank is busy.
        """
        if self.state != "ready":
            reason = f"is not there: the mesh is {self.state}"
            gone = Deliver(run, tuple(ranks), Parcel(Died(min(ranks), reason, "")))
            return [gone, Finish(run)]
        effects: list[Effect] = []
        living = tuple(rank for rank in ranks if rank not in self.dead)
        self._pending[run] = _Pending(set(ranks))
        if living:
            relay = Relay(living, channel, run, len(frames))
            effects.append(Send(Parcel(relay, tuple(frames))))
        for rank in ranks:
            if rank in self.dead:
                effects += self._settle(run, (rank,), Parcel(self.dead[rank]), 0.0)
        return effects

    def interrupt(self, run: int) -> list[Effect]:
        """Interrupt a run on the ranks that have not ended it."""
        pending = self._pending.get(run)
        return [self._control(pending.ranks, Interrupt(run))] if pending else []

    def ask_states(self, ranks: Iterable[int], now: float) -> tuple[int, list[Effect]]:
        """Ask ranks what they are doing; the answer is rank -> `RankState`."""
        return self._ask(ranks, now, -1)

    def ask_host(self) -> tuple[int, list[Effect]]:
        """Ask the agent for its processes; the answer is `HostReport`."""
        return self._ask_agent(ReadHost(self._new_request()))

    def ask_log(self, rank: int, num_bytes: int) -> tuple[int, list[Effect]]:
        """Ask for the end of a rank's log; the answer is `LogText`."""
        return self._ask_agent(ReadLog(self._new_request(), rank, num_bytes))

    def restart(self, dims: Mapping[str, int] | None = None) -> list[Effect]:
        """Replace every rank; runs in flight end.

        Args:
            dims: of the new ranks' DeviceMesh; None for those of the start.
        """
        if self.state in ("stopping", "ended"):
            return []
        effects = self._abandon_all("was restarted")
        self.state = "restarting"
        return [
            *effects,
            Send(Parcel(Restart(tuple(dims or ()), tuple((dims or {}).values())))),
            Change(self.state, None),
        ]

    def stop(self) -> list[Effect]:
        """End the mesh."""
        if self.state in ("stopping", "ended"):
            return []
        self.state = "stopping"
        return [Send(Parcel(Stop()))]

    # ---- what happens

    def receive(self, parcel: Parcel[Any], now: float) -> list[Effect]:
        """The agent said something."""
        verb = parcel.verb
        if self.state == "ended":
            return []
        match verb:
            case Ranked():
                return self._from_ranks(verb.ranks, Parcel(verb.verb, parcel.buffers), now)
            case Died():
                self.dead[verb.rank] = verb
                effects: list[Effect] = [Change(self.state, verb)]
                for run, pending in list(self._pending.items()):
                    if verb.rank in pending.ranks:
                        effects += self._settle(run, (verb.rank,), parcel, now)
                return effects
            case LogText() | HostReport():
                return [Answer(verb.request, verb)]
            case Welcome() | Progress():
                if self.state == "connecting":
                    self.state = "starting"
            case MeshReady():
                if self.state != "stopping":
                    self.state, self.ranks, self.dead = "ready", verb.ranks, {}
            case StartFailed() | Refused():
                return [*self._abandon_all("did not start"), Change("stopping", verb)]
            case Stopped():
                return self.agent_ended(verb.reason, verb)
            case StoreDied():
                pass
        return [Change(self.state, verb)]

    def agent_ended(self, reason: str, cause: Any = None) -> list[Effect]:
        """The agent is gone, and every rank with it."""
        if self.state == "ended":
            return []
        self.state = "ended"
        effects = self._abandon_all(f"ended with its mesh ({reason})")
        effects += [Answer(request, None) for request in self._questions]
        self._questions.clear()
        return [*effects, Change("ended", cause or Stopped(reason))]

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        effects: list[Effect] = []
        for run, pending in self._pending.items():
            if pending.report_at is not None and now >= pending.report_at:
                pending.report_at = None
                effects += self._ask(pending.ranks, now, run)[1]
        for request, question in list(self._questions.items()):
            if now >= question.deadline:
                effects += self._close_question(request)
        return effects

    def deadline(self) -> float | None:
        """When to call `tick` at the latest; None: not before something happens."""
        times = [p.report_at for p in self._pending.values() if p.report_at is not None]
        times += [question.deadline for question in self._questions.values()]
        return min(times, default=None)

    # ---- inside

    def _from_ranks(self, ranks: tuple[int, ...], parcel: Parcel[Any], now: float) -> list[Effect]:
        verb = parcel.verb
        match verb:
            case Done() | Failed():
                return self._settle(verb.run, ranks, parcel, now)
            case Output() | Skipped() | Display():
                return [Deliver(verb.run, ranks, parcel)]
            case RankState():
                question = self._questions.get(verb.request)
                if question is not None:
                    question.answers.update(dict.fromkeys(ranks, verb))
                    if question.ranks <= question.answers.keys():
                        return self._close_question(verb.request)
        return []

    def _settle(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any], now: float) -> list[Effect]:
        """These ranks have ended the run."""
        pending = self._pending.get(run)
        if pending is None:
            return []
        ranks = tuple(rank for rank in ranks if rank in pending.ranks)
        if not ranks:
            return []
        pending.ranks.difference_update(ranks)
        effects: list[Effect] = [Deliver(run, ranks, parcel)]
        if not pending.ranks:
            del self._pending[run]
            effects.append(Finish(run))
        elif type(parcel.verb) is not Done and pending.report_at is None:
            pending.report_at = now + REPORT_AFTER_S
        return effects

    def _abandon_all(self, reason: str) -> list[Effect]:
        effects: list[Effect] = []
        for run, pending in list(self._pending.items()):
            ranks = tuple(sorted(pending.ranks))
            effects += self._settle(run, ranks, Parcel(Died(ranks[0], reason, "")), 0.0)
        return effects

    def _ask(self, ranks: Iterable[int], now: float, about_run: int) -> tuple[int, list[Effect]]:
        request = self._new_request()
        living = {rank for rank in ranks if rank not in self.dead}
        if not living or self.state not in ("ready", "restarting"):
            return request, [Answer(request, {})]
        self._questions[request] = _Question(living, now + ANSWER_S, about_run=about_run)
        return request, [self._control(living, Probe(request))]

    def _ask_agent(self, verb: ReadHost | ReadLog) -> tuple[int, list[Effect]]:
        effect = Answer(verb.request, None) if self.state == "ended" else Send(Parcel(verb))
        return verb.request, [effect]

    def _close_question(self, request: int) -> list[Effect]:
        question = self._questions.pop(request)
        if question.about_run < 0:
            return [Answer(request, question.answers)]
        pending = self._pending.get(question.about_run)
        states = {
            rank: state
            for rank, state in question.answers.items()
            if pending is not None and rank in pending.ranks and state.run == question.about_run
        }
        return [Waits(question.about_run, states)] if states else []

    def _control(self, ranks: Iterable[int], verb: Control) -> Send:
        frames = encode([Parcel(verb)])
        return Send(Parcel(Relay(tuple(sorted(ranks)), "control", -1, len(frames)), tuple(frames)))

    def _new_request(self) -> int:
        self._next_request += 1
        return self._next_request


def encode_work(work: Work | Peek, buffers: Sequence[Frame] = ()) -> list[Frame]:
    """The frames of one piece of work."""
    return encode([Parcel(work, tuple(buffers))])
