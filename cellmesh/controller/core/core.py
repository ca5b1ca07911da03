"""The state machine of the controller, as pure code: without sockets, threads or clocks.

`Core` knows the mesh's state, which ranks each run still waits for, and which requests are
unanswered. Each of its methods takes an event and its time, and returns effects for the link to
carry out. `recovery.Recovery` brings the mesh back after a failure.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...wire.attach import Detach, Detached, Refused, Welcome
from ...wire.codec import Parcel
from ...wire.environment import Surroundings
from ...wire.groups import Blueprint
from ...wire.messages import (
    Control,
    Died,
    Done,
    Failed,
    Failing,
    LogText,
    MeshReady,
    Progress,
    Ranked,
    ReadLog,
    Relay,
    Resize,
    Respawned,
    RespawnFailed,
    Restart,
    SetDims,
    StartFailed,
    Stop,
    Stopped,
    StoreDied,
    interrupted_unbegun,
)
from ...wire.peer_calls import PEER_RUNS, PeerWork
from ...wire.ranks import describe_ranks
from ...wire.status import HostReport, RankState, ReadHost, StackText
from ...wire.stopping import StopState
from ...wire.verbs import InputCancelled, InputReply, InputRequest
from .effects import Answer as Answer
from .effects import Change as Change
from .effects import Deliver as Deliver
from .effects import Effect as Effect
from .effects import Finish as Finish
from .effects import HealReport as HealReport
from .effects import Judge as Judge
from .effects import Note as Note
from .effects import Send as Send
from .effects import State as State
from .effects import Watch as Watch
from .effects import tell_busy
from .mesh_state import FIRST_HEAL, HostLost, MeshState, Pending, Returned
from .recovery import Recovery
from .requests import ANSWER_S as ANSWER_S
from .requests import Questions, control
from .runs import Runs


class Core:
    """The state machine of the controller of one mesh: turns messages of the agent and requests of
    the user into effects.

    Args:
        num_ranks: number of ranks.
        dims: dims of the DeviceMesh, name -> size.
        settle_s: how long the other ranks of a run may take to end after one has failed, in
            seconds.
        auto_heal: whether dead ranks are replaced without a request of the user.
        new_generation: returns a number that no earlier heal of the mesh has used.
        last_request: numbers of requests begin above this one.
        num_resizes: how often the mesh has been resized.
        layout: number of ranks of each host; () for one host.

    Attributes:
        mesh: state of the mesh; only the core changes it.
        runs: state machine of the runs in flight.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        dims: Mapping[str, int] | None = None,
        settle_s: float = 1.0,
        auto_heal: bool = False,
        new_generation: Callable[[], int] = lambda: secrets.randbits(48),
        last_request: int = 0,
        num_resizes: int = 0,
        layout: tuple[int, ...] = (),
    ) -> None:
        self.mesh = MeshState(
            num_ranks, dims=dict(dims or {}), num_resizes=num_resizes, layout=layout
        )
        self._questions = Questions(last_request)
        self._recovery = Recovery(self.mesh, self._questions, new_generation, auto_heal)
        self.runs = Runs(self.mesh, self._questions, self._recovery, settle_s)
        self._now = 0.0
        self._is_attached = True  # to a mesh that an earlier controller has started

    @property
    def state(self) -> State:
        """The state of the mesh, e.g. ``ready``."""
        return self.mesh.state

    @property
    def dead(self) -> Mapping[int, Died]:
        """The dead ranks, each with the message that reports its death."""
        return self.mesh.dead

    @property
    def lost(self) -> set[int]:
        """The dead ranks that no recovery in progress will replace."""
        return self.mesh.dead.keys() - self.mesh.missing()

    @property
    def is_recovering(self) -> bool:
        """Whether a recovery of the mesh is in progress."""
        return self._recovery.phase != "calm"

    # ---- requests of the user

    def submit(self, parcel: Parcel[Relay], now: float | None = None) -> list[Effect]:
        """Register a run, and return the messages that send it to its ranks.

        Args:
            parcel: the encoded work and its ranks; the number of its run must be a new one.
            now: current time in seconds; None for the time of the last event.
        """
        now, relay = self._see(now), parcel.verb
        run, ranks = relay.run, relay.ranks
        is_gone = ranks[-1] >= self.mesh.num_ranks  # resized after the caller has looked
        if self.mesh.state != "ready" or is_gone:
            reason = f"cannot be reached: the mesh is {'smaller' if is_gone else self.state}"
            died = Parcel(Died(min(ranks), reason, ""))
            return [Deliver(run, ranks, died, has_begun=False), Finish(run)]
        is_of_main, waits = relay.channel == "work", relay.interleaves
        effects = self._recovery.before_run(ranks, now) if is_of_main else []
        pending = Pending(
            ranks,
            set(ranks),
            now,
            now,
            now,
            is_of_main and not waits,
            waits,
            fills=relay.fills,
            title=relay.title,
        )
        effects += self.runs.add(run, pending)
        dead, left = self.mesh.dead, ranks
        gone, awaited = set[int](), set[int]()
        if dead:
            gone, awaited = self.lost if is_of_main else set(dead), self.mesh.missing()
        if gone:
            left = tuple([rank for rank in ranks if rank not in gone])
            parcel = Parcel(msgspec.structs.replace(relay, ranks=left), parcel.buffers)
        pending.is_sent = bool(left)
        if is_of_main and left and (self._recovery.phase != "calm" or awaited.intersection(left)):
            self.runs.defer(run, pending, parcel)
        elif left:
            effects.append(Send(parcel))
        for rank in gone.intersection(ranks) and [rank for rank in ranks if rank in gone]:
            effects += self.runs.settle(run, (rank,), Parcel(dead[rank]), now)
        return effects

    def wait_for(self, run: int) -> list[Effect]:
        """Record that the user waits for this run and will submit nothing else, so that ranks
        without work cannot join its collectives.
        """
        if run in self.mesh.pending:
            self.mesh.pending[run].is_waited_for = True
        return []

    def interrupt(self, runs: Iterable[int], now: float | None = None) -> list[Effect]:
        """Interrupt runs on the ranks that have not ended them; at a second call, kill the ranks
        that do not stop.

        Args:
            runs: their numbers.
            now: current time in seconds; None for the time of the last event.
        """
        return self.runs.interrupt(runs, self._see(now))

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> list[Effect]:
        """Return the messages that send the user's input to ranks that wait for it.

        Args:
            requests: rank -> number of its request (`InputRequest`).
            text: text that the user typed.
            is_end: whether the user ended the input (end of file).
        """
        asking = self.mesh.forget_asking(requests)
        return [control([rank], InputReply(requests[rank], text, is_end)) for rank in asking]

    def ask(
        self, ranks: Iterable[int], verb: Callable[[int], Control], now: float
    ) -> tuple[int, list[Effect]]:
        """Send a request (`Probe`, `Stacks`) to the control threads of ranks.

        Args:
            ranks: ranks to ask; dead ones are left out.
            verb: makes the request's message from its number.
            now: current time in seconds.

        Returns:
            The request's number, and effects; a later `Answer` has rank -> reply.
        """
        request = self._questions.new_request()
        living = self.mesh.among_living(ranks) if self.state in ("ready", "restarting") else ()
        return request, self._questions.ask(
            living, verb, self._see(now), lambda answers, now: [Answer(request, answers)], request
        )

    def ask_agent(self, verb: Callable[[int], ReadHost | ReadLog]) -> tuple[int, list[Effect]]:
        """Ask the agent for its processes or a log; a later `Answer` has the `HostReport` or
        `LogText`.
        """
        request = self._questions.new_request()
        has_ended = self.state == "ended"
        return request, [Answer(request, None) if has_ended else Send(Parcel(verb(request)))]

    def heal(self, now: float) -> tuple[int, list[Effect]]:
        """Replace dead ranks, and rebuild process groups where needed; a later `Answer` has the
        `HealReport`.
        """
        request = self._questions.new_request()
        if self.state != "ready":
            return request, [Answer(request, HealReport(failure=f"the mesh is {self.state}"))]
        return request, self._recovery.heal(request, self._see(now))

    def replace(self, ranks: Collection[int], now: float) -> list[Effect]:
        """Replace those of these ranks that are dead, once no rank executes work, for the sake of
        their actors.
        """
        self.mesh.supervised.update(ranks)
        self.mesh.to_replace.update(self.mesh.dead.keys() & ranks)
        waits = self.mesh.in_failed_run({*ranks})  # whose end begins the recovery
        return [] if waits else self._recovery.begin(self._see(now))

    def why_not_resize(self, num_ranks: int) -> str:
        """Return why the mesh cannot be resized to this number of ranks now; "" if it can."""
        if self.state != "ready":
            return f"the mesh is {self.state}"
        if dead := [rank for rank in sorted(self.dead) if rank < num_ranks]:
            return f"{describe_ranks(dead)} must live for that: `%dist_heal`, then resize"
        if busy := self.mesh.with_work():
            return tell_busy(self.mesh.running(sorted(busy)), "resize")
        if ending := self.mesh.waiting_beyond(num_ranks):
            return f"it would end {ending}: cancel that (`run.cancel()`), then resize"
        return "" if self._recovery.is_at_rest else "the mesh is being healed: resize it then"

    def resize(
        self, layout: tuple[int, ...], dims: Mapping[str, int], now: float
    ) -> tuple[int, list[Effect]]:
        """Change the number of ranks of a mesh that can be resized (`why_not_resize`); a later
        `Answer` has the `HealReport`.
        """
        request, before = self._questions.new_request(), self.mesh.num_ranks
        self.mesh.resize(layout, dims)
        number, shape = self.mesh.num_resizes, tuple(dims.values())
        order = Send(Parcel(Resize(number, layout, tuple(dims), shape)))
        new = range(before, self.mesh.num_ranks)
        return request, [order, *self._recovery.resize(request, new, self._see(now))]

    def await_calm(self) -> tuple[int, list[Effect]]:
        """Return the number of a request whose `Answer`, a note on the recovery, follows once no
        recovery is in progress.
        """
        request = self._questions.new_request()
        return request, self._recovery.await_calm(request)

    def abandon_heal(self) -> list[Effect]:
        """Stop a heal that the user no longer waits for."""
        return self._recovery.on("abandoned", self._now)

    def set_dims(self, dims: Mapping[str, int]) -> list[Effect]:
        """Record new dims of the DeviceMesh; return the message that sends them to the agent."""
        self.mesh.dims = dict(dims)
        return [Send(Parcel(SetDims(tuple(dims), tuple(dims.values()))))]

    def restart(
        self, dims: Mapping[str, int] | None = None, changes: Surroundings | None = None
    ) -> list[Effect]:
        """Return the messages that replace every rank; runs in flight end.

        Args:
            dims: dims of the new ranks' DeviceMesh, name -> size; None for those of the start.
            changes: differences of the new ranks' environment and working directory from those of
                the earlier ranks; None for none.
        """
        if self.state in ("stopping", "ended"):
            return []
        self.mesh.state = "restarting"
        effects, dims = self._abandon_all("was restarted"), dims or {}
        order = Restart(tuple(dims), tuple(dims.values()), changes or Surroundings())
        return [*effects, Send(Parcel(order)), Change(self.state, None)]

    def detach(self) -> list[Effect]:
        """Return the message by which this controller leaves the mesh; the ranks keep running until
        the lease of the mesh ends.
        """
        return [] if self.state == "ended" else [Send(Parcel(Detach()))]

    def stop(self) -> list[Effect]:
        """Return the messages that end the mesh."""
        if self.state in ("stopping", "ended"):
            return []
        self.mesh.state = "stopping"
        return [*self._recovery.reset("the mesh was stopped", self._now), Send(Parcel(Stop()))]

    # ---- events

    def receive(self, parcel: Parcel[Any], now: float) -> list[Effect]:
        """Handle a message of the agent."""
        now = self._now = max(self._now, now)
        verb = parcel.verb
        if self.mesh.state == "ended":
            return []
        match verb:
            case Ranked():
                return self._from_ranks(verb.ranks, Parcel(verb.verb, parcel.buffers), now)
            case Died(rank):
                return self._ranks_died((rank,), parcel, now)
            case HostLost(host, ranks, reason):
                died = Parcel(Died(min(ranks), f"was on {host}, which is lost: {reason}", ""))
                return [Change(self.state, verb), *self._ranks_died(ranks, died, now)]
            case LogText() | HostReport():
                return [Answer(verb.request, verb)]
            case Welcome():
                return self._welcomed(verb, now)
            case Progress():
                self._is_attached = False
                if self.state == "connecting":
                    self.mesh.state = "starting"
            case MeshReady():
                return self._mesh_ready(verb, now)
            case Respawned():
                return [*self._recovery.respawned(verb.ranks, now), Change(self.state, verb)]
            case Returned(infos):
                return [Change(self.state, verb), *self._recovery.returned(infos, now)]
            case RespawnFailed():
                effects = self._recovery.respawn_failed(verb.ranks, verb.text, now)
                return [*effects, Change(self.state, verb)]
            case StartFailed() | Refused():
                return [*self._abandon_all("did not start"), Change("stopping", verb)]
            case Stopped() | Detached():
                return self.agent_ended(verb.reason, verb)
            case StoreDied():
                self.mesh.store_port = verb.new_port
                self.mesh.store_address = verb.new_address or self.mesh.store_address
                moved = self._recovery.store_moved(now) if verb.new_port else []
                return [Change(self.state, verb), *moved]
        return [Change(self.state, verb)]

    def agent_ended(self, reason: str, cause: Any = None) -> list[Effect]:
        """Handle the end of the mesh: its agent and ranks have ended, or are out of reach."""
        if self.state == "ended":
            return []
        self.mesh.state = "ended"
        what = "can no longer be reached" if isinstance(cause, Detached) else "ended with the mesh"
        effects = [*self._abandon_all(f"{what} ({reason})"), *self._questions.close_all(self._now)]
        return [*effects, Change("ended", cause or Stopped(reason))]

    def tick(self, now: float) -> list[Effect]:
        """Act on deadlines that have passed: those of runs, of requests and of the recovery."""
        now = self._now = max(self._now, now)
        effects = self.runs.tick(now)
        if self._questions.open:
            effects += self._questions.tick(now)
        if not self._recovery.is_at_rest:
            effects += self._recovery.tick(now)
        return effects

    def deadline(self) -> float | None:
        """Return when to call `tick` at the latest, in seconds; None if no deadline is set."""
        due = self.runs.deadline()
        if not self._questions.open and self._recovery.is_at_rest:  # the usual case, made cheap
            return due
        others = (due, self._questions.deadline(), self._recovery.deadline())
        return min((at for at in others if at is not None), default=None)

    # ---- inside: messages of the agent

    def _see(self, now: float | None) -> float:
        self._now = self._now if now is None else max(self._now, now)
        return self._now

    def _welcomed(self, welcome: Welcome, now: float) -> list[Effect]:
        if self.state == "connecting":
            self.mesh.state = "starting"
            if welcome.mesh_dim_names:
                self.mesh.dims = dict(zip(welcome.mesh_dim_names, welcome.mesh_shape, strict=True))
            for info in welcome.runs:
                self.runs.add(
                    info.run,
                    Pending(
                        info.ranks,
                        set(info.ranks),
                        now,
                        now,
                        now,
                        not info.interleaves,
                        info.interleaves,
                        fills=True,
                        title=info.title,
                    ),
                )
        return [Change(self.state, welcome)]

    def _mesh_ready(self, ready: MeshReady, now: float) -> list[Effect]:
        if self.state == "stopping":
            return [Change(self.state, ready)]
        effects: list[Effect] = []
        if self.state == "ready":  # the mesh was restarted twice
            self.mesh.state = "restarting"
            effects = self._abandon_all("was restarted")
        self.mesh.begin(ready)
        effects += [*self._recovery.reset("every rank is new", now), Change(self.state, ready)]
        effects += self._recovery.resume_all(now) if self._is_attached else []
        self._is_attached = False
        return effects

    def _from_ranks(self, ranks: tuple[int, ...], parcel: Parcel[Any], now: float) -> list[Effect]:
        verb = parcel.verb
        match verb:
            case Done() | Failed():
                return self._ended_on(ranks, parcel, now)
            case Failing():
                return self.runs.fails_on(verb.run, ranks, now)
            case InputRequest():
                self.mesh.asking.update(dict.fromkeys(ranks, verb.request))
            case InputCancelled():
                self.mesh.forget_asking(dict.fromkeys(ranks, verb.request))
            case PeerWork():
                return self.runs.peer_calls.begin(verb, ranks, now)
            case StopState():
                return self.runs.alignment.report(ranks, verb, now)
            case RankState() | StackText() | Blueprint():
                return self._questions.answer(verb.request, ranks, verb, now)
        return [Deliver(verb.run, ranks, parcel)]

    def _ended_on(
        self, ranks: tuple[int, ...], parcel: Parcel[Done | Failed], now: float
    ) -> list[Effect]:
        verb, pending = parcel.verb, self.mesh.pending.get(parcel.verb.run)
        is_of_peer, effects = verb.run in PEER_RUNS, list[Effect]()
        if is_of_peer and isinstance(verb, Failed):
            effects = self.runs.peer_calls.fail(verb.run, now)
        if pending is None or pending.is_work:
            for rank in ranks if self.mesh.asking else ():
                self.mesh.asking.pop(rank, None)
            if isinstance(verb, Failed):
                self.mesh.held.update(dict.fromkeys(ranks, verb.run))
            elif verb.counts:
                self._recovery.tally.add(ranks, verb.counts)
        if pending is None:
            # A recovery may have found ranks in such a call, and waits for its end.
            is_open = isinstance(verb, Failed) or verb.run >= FIRST_HEAL
            is_open = is_open or (is_of_peer and bool(self.mesh.missing()))
            return self._recovery.begin(now) if is_open else []
        has_begun = type(verb) is Done or verb != interrupted_unbegun(verb.run)
        return [*effects, *self.runs.settle(verb.run, ranks, parcel, now, has_begun)]

    def _ranks_died(self, ranks: Sequence[int], parcel: Parcel[Died], now: float) -> list[Effect]:
        """Handle the death of ranks that have died together."""
        is_ready = self.state == "ready"
        news = [rank for rank in ranks if rank not in self.dead and is_ready]
        effects: list[Effect] = []
        for rank in ranks:
            died = self.mesh.dead[rank] = msgspec.structs.replace(parcel.verb, rank=rank)
            self.mesh.held.pop(rank, None)
            self.mesh.asking.pop(rank, None)
            effects.append(Change(self.state, died))
        for rank in news:
            self._recovery.rank_died(rank)
        effects += self.runs.ranks_died(ranks, parcel, now)
        for rank in ranks:
            effects += self._questions.forget_rank(rank, now)
        return [*effects, *self._recovery.after_deaths(news, now)] if news else effects

    def _abandon_all(self, reason: str) -> list[Effect]:
        effects = self._recovery.reset(f"the mesh {reason}", self._now)
        self.mesh.held.clear()
        return [*effects, *self.runs.abandon(reason, self._now)]
