"""A mesh in memory whose ranks say what a test has them say."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cellmesh.controller.run import Run
from cellmesh.wire import payload
from cellmesh.wire.codec import (
    Frame,
    Parcel,
    at_agent_from_rank,
    at_rank_for_control,
    at_rank_for_work,
    encode,
)
from cellmesh.wire.groups import Blueprint, Describe, GroupCount, Heal
from cellmesh.wire.inspect import Names
from cellmesh.wire.messages import (
    Done,
    Failed,
    Interrupt,
    Leave,
    Pickled,
    RankReady,
    Release,
    Request,
    Resume,
)
from cellmesh.wire.peer_calls import PEER_RUNS, PeerWork
from cellmesh.wire.status import Probe, RankState, WaitingCall
from cellmesh.wire.stopping import Pause, StopState
from cellmesh.wire.values import PullNames, PushNames
from cellmesh.wire.verbs import Output, RunCall
from cellmesh.workers.agent.supervisor import Fork

from .world import BothSides

Frames = Sequence[Frame]


class ScriptedRank:
    """A rank, which runs what it is given until a test has it end that.

    After a run that failed it holds back what follows, until it is healed or told to go on.

    Args:
        rank: its number.
        pid: its process.
        say: carries what it says to its agent.
    """

    def __init__(self, rank: int, pid: int, say: Callable[[Frames], None]) -> None:
        self.rank, self.pid = rank, pid
        self.queue: collections.deque[int] = collections.deque()
        self.interrupted: set[int] = set()
        self.released: set[int] = set()
        self.collective = ""
        self.answers_probes = True
        self.is_broken = False
        self.is_doomed = False
        self.was_asked_to_leave = False
        self.holds = False
        self.waiting: list[int] = []  # calls that wait beside the first of its queue
        self._heals: collections.deque[int] = collections.deque()
        self._send = say

    @property
    def running(self) -> bool:
        """Whether it runs the first of its queue."""
        return bool(self.queue) and not self.holds

    def ready(self) -> None:
        self._say(RankReady("cpu", "gloo"))

    def print(self, text: str, stream: Any = "stdout") -> None:
        self._say(Output(self.queue[0], stream, text))

    def done(self, value: Any = None, counts: Sequence[GroupCount] = ()) -> None:
        """Answer the first run with a value, after collectives."""
        assert self.running, "work that is held back cannot end"
        run = self.queue.popleft()
        if value is None:
            self._say(Done(run, counts=tuple(counts)))
        else:
            pickled, buffers = payload.dumps(value, "value")
            self._say(Done(run, pickled), buffers)
        self._heal()

    def fail(self, error: BaseException, line: int = 1) -> None:
        """Answer the first run with an exception."""
        assert self.running, "work that is held back cannot fail"
        run = self.queue.popleft()
        self.holds = True
        kind = type(error).__name__
        pickled, buffers = payload.dumps(error, "error")
        released = run in self.released and isinstance(error, KeyboardInterrupt)
        failed = Failed(run, kind, str(error), f"{kind}: {error}", line, pickled, released=released)
        self._say(failed, buffers)
        self._heal()

    def obey(self) -> None:
        """Answer the first run as an interrupted or released rank does."""
        self.fail(KeyboardInterrupt("interrupted in sleep"))

    def end_waiting(self, run: int, error: BaseException | None = None) -> None:
        """Answer a call that waits; what follows is not held back."""
        self.waiting.remove(run)
        kind = type(error).__name__
        self._say(Done(run) if error is None else Failed(run, kind, str(error), kind, 1))

    def serve(self, call: PeerWork, is_reported: bool = True) -> None:
        """Begin to execute a call of another rank, before all that waits."""
        self.queue.appendleft(call.run)
        if is_reported:
            self._say(call)

    def end_serving(self, error: BaseException | None = None, is_reported: bool = True) -> None:
        """Answer a call of another rank; what follows is not held back."""
        run, kind = self.queue.popleft(), type(error).__name__
        if is_reported:
            self._say(Done(run) if error is None else Failed(run, kind, str(error), "", 1))
        self._heal()

    # ---- what reaches it

    def hear_work(self, frames: Frames) -> None:
        for verb, _ in at_rank_for_work().decode(frames):
            match verb:
                case Heal(run):
                    self._heals.append(run)
                    if not self.running:
                        self._heal()
                case Resume():
                    self.holds = False
                case RunCall(interleaves=True):
                    self.waiting.append(verb.run)
                case _:
                    self.queue.append(verb.run)

    def hear_control(self, frames: Frames) -> None:
        for verb, _ in at_rank_for_control().decode(frames):
            match verb:
                case Probe(request):
                    if self.answers_probes:
                        self._say(self._state(request))
                case Describe(request):
                    self._say(Blueprint(request, b"groups"))
                case Pause(run):
                    self._say(StopState(run, True, False, False, 0.0, ()))
                case Interrupt(run):
                    self.interrupted.add(run)
                case Release(run):
                    self.released.add(run)
                case Request(run, subject):
                    pickled, buffers = payload.dumps(
                        f"{type(subject).__name__} on {self.rank}", "look"
                    )
                    self._say(Done(run, pickled), buffers)
                case Leave():
                    self.was_asked_to_leave = True

    def _state(self, request: int) -> RankState:
        calls, is_broken = tuple(WaitingCall(run, "f") for run in self.waiting), self.is_broken
        if not self.running:
            idle = RankState(request, -1, 0, 0, "", "", "cpu", 0, is_broken=is_broken)
            return msgspec.structs.replace(idle, waiting=calls)
        run, collective = self.queue[0], self.collective
        busy = RankState(request, run, 1, 5, "m.f", collective, "cpu", 0, is_broken=is_broken)
        return msgspec.structs.replace(busy, waiting=calls, waited_s=60.0 if collective else 0.0)

    def _heal(self) -> None:
        while self._heals and not (self.queue and self.queue[0] in PEER_RUNS):
            self.holds = self.is_broken = False
            self._say(Done(self._heals.popleft()))

    def _say(self, verb: Any, buffers: Frames = ()) -> None:
        self._send(encode([Parcel(verb, tuple(buffers))]))


class World(BothSides[ScriptedRank]):
    """A mesh of scripted ranks."""

    def submit(self, ranks: Sequence[int] | None = None, fills: bool = False) -> Run[Any]:
        """Start a run; what it is to do is up to the ranks."""
        verb = PushNames(0, Pickled(b"")) if fills else PullNames(0, "x")
        return self.begin(verb, range(self.num_ranks) if ranks is None else ranks)

    def waiting(self, ranks: Sequence[int] | None = None) -> Run[Any]:
        """Start a call that waits beside other work, and that its ranks begin."""
        verb = RunCall(0, Pickled(b""), interleaves=True)
        run = self.begin(verb, range(self.num_ranks) if ranks is None else ranks)
        self.deliver()
        return run

    def running(self, ranks: Sequence[int] | None = None, fills: bool = False) -> Run[Any]:
        """Start a run that its ranks begin."""
        run = self.submit(ranks, fills)
        self.deliver()
        return run

    def done(self, *ranks: int, seconds: float = 0.01) -> None:
        """Ranks, or all, end the first of their runs, each with its number; and time passes."""
        for rank in ranks or list(self.ranks):
            self.ranks[rank].done(rank)
        self.wait(seconds)

    def begin_again(self) -> None:
        """The ranks of a restart come up, once the earlier ones have ended."""
        self.deliver()
        self.reap_doomed()
        self.get_ready()

    def causes(self, kind: type) -> list[Any]:
        """Return the notes of one kind that the mesh's owner has received."""
        return [change.cause for change in self.changes if isinstance(change.cause, kind)]

    def look(self, ranks: Sequence[int]) -> Run[Any]:
        """Start a run that control threads answer."""
        return self.begin(Request(0, Names()), ranks, channel="control")

    def hear_rank(self, rank: int, frames: Frames) -> None:
        """A rank said something."""
        for parcel in at_agent_from_rank().decode(frames):
            self.act(self.supervisor.from_rank(rank, parcel, self.now))

    def _new_rank(self, order: Fork, rank: int, pid: int) -> ScriptedRank:
        return ScriptedRank(rank, pid, functools.partial(self.hear_rank, rank))
