"""The state machine of runs in flight: decides which ranks to release from collectives that can
never end, which to interrupt or kill, and when a run has ended.

Pure, as `core.Core`. The table `transitions.RUN` has the action for each event of a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from ...wire.codec import Parcel
from ...wire.messages import (
    Died,
    Done,
    Failed,
    Interrupt,
    Kill,
    Relay,
    Release,
    interrupted_unbegun,
)
from ...wire.peer_calls import PEER_RUNS
from ...wire.status import Probe, RankState
from .alignment import Alignment, Told
from .effects import Deliver, Effect, Finish, Note, Send
from .mesh_state import FIRST_HEAL, MeshState, Pending, order_of
from .peer_calls import PeerCalls
from .recovery import Recovery
from .requests import Questions, control
from .stopping import Verdict
from .sweeps import SWEEP_S, Sweeps
from .transitions import RUN, RunEvent, RunPhase

# A second interrupt within `ESCALATE_S` of the first kills the ranks that have not stopped within
# `STOP_S` of the first.
ESCALATE_S = 5.0
STOP_S = 2.0

STEP_WAS_INTERRUPTED = (
    "an optimizer's step was interrupted: %dist_check shows whether replicas still agree, "
    "%dist_sync makes them equal"
)


class Runs:
    """The state machine of the runs in flight of one mesh.

    Args:
        mesh: state of the mesh and of its runs.
        questions: sends requests to ranks.
        recovery: examines the mesh after a run has ended.
        settle_s: how long the other ranks of a run may take to end after one has failed, in
            seconds.
    """

    def __init__(
        self,
        mesh: MeshState,
        questions: Questions,
        recovery: Recovery,
        settle_s: float,
    ) -> None:
        self._mesh = mesh
        self._questions = questions
        self._recovery = recovery
        self._settle_s = settle_s
        self._settling: set[int] = set()  # runs with a deadline of their own
        self._sweeps = Sweeps(mesh, questions, settle_s, self._on)
        self.alignment = Alignment(mesh, self._on)
        self.peer_calls = PeerCalls(mesh, self.add, self._on, self.interrupt)
        recovery.send_deferred = self.send_deferred

    def add(self, run: int, pending: Pending) -> list[Effect]:
        """Register a run as in flight; its output begins with a note on replaced ranks that no
        output has mentioned yet.
        """
        if not self._mesh.pending:
            self._sweeps.at = pending.started_at + SWEEP_S
        self._mesh.pending[run] = pending
        self._sweeps.came.update(pending.members)
        is_first = pending.fills and self._mesh.news
        return self._mesh.tell_news(run, pending.members) if is_first else []

    def defer(self, run: int, pending: Pending, parcel: Parcel[Relay]) -> None:
        """Hold a run back until the recovery is over."""
        pending.is_sent = False
        self._mesh.note(run, pending, pending.phase, "deferred", pending.started_at)
        self._mesh.deferred[run] = parcel

    def send_deferred(self, now: float) -> list[Effect]:
        """Return the messages that send all deferred runs to their living ranks."""
        waiting, self._mesh.deferred = self._mesh.deferred, {}
        effects: list[Effect] = []
        for run, (relay, frames) in waiting.items():
            pending = self._mesh.pending.get(run)
            if pending is None:
                continue
            pending.begin(now)
            self._mesh.note(run, pending, "waiting", "sent", now)
            dead = self._mesh.dead
            left = tuple(r for r in relay.ranks if r in pending.ranks and r not in dead)
            if pending.fills:
                effects += self._mesh.tell_news(run, pending.members)
            if left:
                effects.append(Send(Parcel(msgspec.structs.replace(relay, ranks=left), frames)))
            for rank in sorted(pending.ranks & dead.keys()):
                effects += self.settle(run, (rank,), Parcel(dead[rank]), now)
        return effects

    def interrupt(self, runs: Iterable[int], now: float) -> list[Effect]:
        """Interrupt runs on the ranks that have not ended them; at a second call, kill the ranks
        that do not stop.

        Args:
            runs: their numbers.
            now: current time in seconds.
        """
        told: Told = {}
        unclear: dict[int, set[int]] = {}
        settled: list[Effect] = []
        for run in sorted(runs, key=order_of, reverse=True):
            pending = self._mesh.pending.get(run)
            if pending is not None:
                first = pending.interrupted_at
                is_of_main = pending.is_work or pending.interleaves
                is_again = first is not None and now - first <= ESCALATE_S and is_of_main
                event: RunEvent = "interrupted again" if is_again else "interrupted"
                if not is_again and self.alignment.is_out_of_reach(run, pending):
                    event = "interrupted at once"
                settled += self._on(event, run, pending, now, told, unclear)
        effects: list[Effect] = [control(ranks, *verbs) for ranks, verbs in told.items()]
        if asked := set[int]().union(*unclear.values()):
            effects += self._questions.ask(
                asked, Probe, now, lambda states, now: self._settle_queued(unclear, states, now)
            )
        return [*effects, *settled]

    def _on(
        self, event: RunEvent, run: int, pending: Pending, now: float, *args: Any
    ) -> list[Effect]:
        """Carry out the action of the table `RUN` for an event in a run's phase, if any.

        Args:
            event: the event.
            run: number of the run.
            pending: the run.
            now: current time in seconds.
            *args: arguments of the action.
        """
        before: RunPhase = pending.phase if pending.is_sent else "waiting"
        if (before, event) not in RUN:
            return []
        phase, action = RUN[before, event]
        pending.phase = phase or pending.phase
        self._mesh.note(run, pending, before, event, now)
        effects: list[Effect] = getattr(self, f"_{action}")(run, pending, now, *args)
        return effects

    def _pass_over(self, run: int, pending: Pending, now: float, *_: Any) -> list[Effect]:
        self._mesh.deferred.pop(run, None)
        return self._settle_unbegun(run, tuple(sorted(pending.ranks)), now)

    def _interrupt(
        self,
        run: int,
        pending: Pending,
        now: float,
        told: Told,
        unclear: dict[int, set[int]],
        aligned: Collection[int] = (),
    ) -> list[Effect]:
        pending.interrupted_at = now
        if rest := tuple(sorted(pending.ranks.difference(aligned))):
            told.setdefault(rest, []).append(Interrupt(run))
        if pending.interleaves:
            unclear[run] = set(pending.ranks)
        if not pending.is_work:
            return []
        held = pending.ranks & self._mesh.held.keys()
        unclear[run] = pending.ranks - held - self._mesh.runs_first(run)
        return self._settle_unbegun(run, tuple(sorted(held)), now)

    def _align(
        self, run: int, pending: Pending, now: float, told: Told, unclear: dict[int, set[int]]
    ) -> list[Effect]:
        paused = self.alignment.begin(run, now, told)
        return self._interrupt(run, pending, now, told, unclear, paused)

    def _strike(self, run: int, pending: Pending, now: float, verdict: Verdict) -> list[Effect]:
        return self.alignment.strike(run, pending, verdict)

    def _strike_failing(self, run: int, pending: Pending, now: float) -> list[Effect]:
        """Interrupt a failing run on its ranks wherever they are, as they may wait for the rank
        that has failed.
        """
        effects = self.alignment.strike(run, pending, Verdict(False))
        return [*effects, *self._give_time(run, pending, now)]

    def _strike_and_condemn(self, run: int, pending: Pending, now: float, *_: Any) -> list[Effect]:
        effects = self.alignment.strike(run, pending, Verdict(False))
        return [*effects, *self._condemn(run, pending, now)]

    def _condemn(self, run: int, pending: Pending, now: float, *_: Any) -> list[Effect]:
        first = now if pending.interrupted_at is None else pending.interrupted_at
        pending.kill_at = pending.kill_at or max(now, first + STOP_S)
        self._settling.add(run)
        return []

    def _settle_queued(
        self, unclear: Mapping[int, set[int]], states: dict[int, RankState], now: float
    ) -> list[Effect]:
        """End interrupted runs on ranks that have not begun them because they still execute an
        older run; ranks that have begun a run report its end themselves.
        """
        effects: list[Effect] = []
        for run, ranks in unclear.items():
            queued = [
                rank
                for rank in ranks & states.keys()
                if self._is_before(states[rank].run, run)
                and all(call.run != run for call in states[rank].waiting)
            ]
            effects += self._settle_unbegun(run, tuple(sorted(queued)), now)
        return effects

    def _is_before(self, executed: int, run: int) -> bool:
        """Return whether a rank that executes a run (-1: none) has not begun another."""
        is_known = executed not in PEER_RUNS or executed in self._mesh.pending
        return executed >= 0 and is_known and order_of(executed) < order_of(run)

    def abandon(self, reason: str, now: float) -> list[Effect]:
        """End all runs, as no rank will report their end any more.

        Args:
            reason: how the ranks count as ended, in words.
            now: current time in seconds.
        """
        effects: list[Effect] = []
        begun = {run: bool(self._mesh.runs_first(run)) for run in self._mesh.pending}
        for run, pending in list(self._mesh.pending.items()):
            ranks = tuple(sorted(pending.ranks))
            effects += self.settle(run, ranks, Parcel(Died(ranks[0], reason, "")), now, begun[run])
        self._settling.clear()
        self.alignment.stopping = None
        return effects

    def ranks_died(self, ranks: Collection[int], parcel: Parcel[Died], now: float) -> list[Effect]:
        """End all runs on ranks that have died together."""
        pending, effects = self._mesh.pending, list[Effect]()
        left = {run: some for run, each in pending.items() if (some := each.ranks & {*ranks})}
        waits = {run: pending[run].title for run in left if pending[run].interleaves}
        # Only one of a method's counts as begun, and shows the death: a stream has many.
        shown = {title: left[run] for run, title in reversed(waits.items())}
        begun = {run: left[run] & self._mesh.runs_first(run) for run in left if run not in waits}
        begun |= {run: shown.pop(title, set()) for run, title in waits.items()}
        for run, some in left.items():
            for part, has_begun in ((begun[run], True), (some - begun[run], False)):
                effects += self.settle(run, tuple(sorted(part)), parcel, now, has_begun)
        return [*effects, *self.peer_calls.ranks_died(ranks, now)]

    def tick(self, now: float) -> list[Effect]:
        """Act on runs whose deadlines have passed, and examine runs that take long."""
        effects: list[Effect] = []
        for run in list(self._settling):
            effects += self._settle_due(run, now)
        if self.alignment.stopping is not None:
            effects += self.alignment.tick(now)
        if self._sweeps.at is not None and now >= self._sweeps.at:
            effects += self._sweeps.begin(now)
        return effects

    def deadline(self) -> float | None:
        """Return when to call `tick` at the latest, in seconds; None if no deadline is set."""
        due = math.inf
        if (stopping := self.alignment.stopping) is not None:
            due = stopping.due_at
        if self._sweeps.at is not None:
            for run in self._mesh.pending:  # `any` would cost a call
                if run < FIRST_HEAL:
                    due = min(due, self._sweeps.at)
                    break
        for run in self._settling:
            pending = self._mesh.pending.get(run)
            if pending is not None and pending.is_sent:
                due = min(due, pending.settle_at or due, pending.kill_at or due)
        return due if due < math.inf else None

    def settle(
        self,
        run: int,
        ranks: tuple[int, ...],
        parcel: Parcel[Any],
        now: float,
        has_begun: bool = True,
    ) -> list[Effect]:
        """Record the end of a run on some of its ranks.

        Args:
            run: number of the run.
            ranks: the ranks that have ended it.
            parcel: their result, failure or death.
            now: current time in seconds.
            has_begun: whether the ranks had begun to execute it.
        """
        pending = self._mesh.pending.get(run)
        if pending is None:
            return []
        if not pending.ranks.issuperset(ranks):
            ranks = tuple(rank for rank in ranks if rank in pending.ranks)
        if not ranks:
            return []
        is_own = run >= FIRST_HEAL
        pending.ranks.difference_update(ranks)
        if self._sweeps.is_under_way:
            self._sweeps.came.update(ranks)
        effects: list[Effect] = [] if is_own else [Deliver(run, ranks, parcel, has_begun)]
        if type(parcel.verb) is Done:
            if pending.fills and (self._mesh.news or self._mesh.failed):
                self._mesh.forget_news(ranks)
            if parcel.verb.counts:
                pending.met.update(ranks)
        else:
            pending.has_failed = True
            self._mesh.failed.update(dict.fromkeys(ranks, pending.title))
            pending.was_in_step |= isinstance(parcel.verb, Failed) and parcel.verb.in_step
        if is_own:
            effects += self._recovery.rank_left_heal(run, ranks, parcel.verb)
        if (stopping := self.alignment.stopping) is not None:
            counts = parcel.verb.counts if type(parcel.verb) is Done else ()
            effects += self.alignment.send_on(stopping.end(run, ranks, counts))
        if not pending.ranks:
            del self._mesh.pending[run]
            self._settling.discard(run)
            if not is_own and (pending.has_failed or pending.phase != "running"):
                self._mesh.note(run, pending, pending.phase, "ended", now)
            if pending.was_in_step:
                effects.append(Note(run, STEP_WAS_INTERRUPTED))
            if not is_own:
                effects.append(Finish(run))
            if stopping is not None:
                effects += self.alignment.run_ended(now)
            return [*effects, *self._recovery.run_ended(run, pending, now)]
        if pending.first_end_at is None:
            pending.first_end_at = now
        if pending.has_failed and pending.settle_at is None and pending.is_work and not is_own:
            effects += self._on("a rank failed", run, pending, now)
        if pending.interleaves and type(parcel.verb) is Failed:
            effects += self._recovery.begin(now)  # the other ranks may wait as long as they like
        return effects if stopping is None else [*effects, *self.alignment.end_if_aligned(now)]

    def fails_on(self, run: int, ranks: tuple[int, ...], now: float) -> list[Effect]:
        """Record that a run has raised on ranks, which will report the exception, and start the
        time limit by which the other ranks must end it.
        """
        pending = self._mesh.pending.get(run)
        if pending is None or not pending.is_work or run >= FIRST_HEAL:
            return []
        pending.failing |= pending.ranks.intersection(ranks)
        if pending.failing and pending.settle_at is None:
            return self._on("a rank failed", run, pending, now)
        return []

    def _give_time(self, run: int, pending: Pending, now: float) -> list[Effect]:
        pending.settle_at = now + self._settle_s
        self._settling.add(run)
        return []

    def _give_more_time(self, run: int, pending: Pending, now: float) -> list[Effect]:
        pending.settle_at = now + max(self._settle_s, SWEEP_S)
        return []

    def _settle_unbegun(self, run: int, ranks: tuple[int, ...], now: float) -> list[Effect]:
        """End an interrupted run on ranks that have not begun to execute it, and will skip it."""
        stopped = interrupted_unbegun(run)
        return self.settle(run, ranks, Parcel(stopped), now, has_begun=False) if ranks else []

    def _settle_due(self, run: int, now: float) -> list[Effect]:
        pending = self._mesh.pending.get(run)
        if pending is None:
            self._settling.discard(run)
            return []
        if not pending.is_sent:
            return []
        effects: list[Effect] = []
        if pending.kill_at is not None and now >= pending.kill_at:
            effects += self._on("still there", run, pending, now)
        if pending.settle_at is not None and now >= pending.settle_at:
            is_asking = pending.ranks & self._mesh.asking.keys()  # in the debugger
            event: RunEvent = "a rank asks the user" if is_asking else "time is over"
            effects += self._on(event, run, pending, now)
        if pending.kill_at is None and pending.settle_at is None:
            self._settling.discard(run)
        return effects

    def _kill(self, run: int, pending: Pending, now: float) -> list[Effect]:
        pending.kill_at = None
        # Others wait behind another run.
        ranks = tuple(sorted(pending.ranks if pending.interleaves else self._mesh.runs_first(run)))
        if not ranks:
            return []
        self._mesh.to_replace.update(ranks)
        return [Send(Parcel(Kill(ranks)))]

    def _leave(self, run: int, pending: Pending, now: float) -> list[Effect]:
        pending.settle_at = None
        return []

    def _release_rest(self, run: int, pending: Pending, now: float) -> list[Effect]:
        pending.settle_at = None
        first = self._mesh.runs_first(run) - pending.failing
        effects = self._release_stuck(run, pending, now, first)
        if pending.ranks - pending.released - pending.failing:  # these have not had their time yet
            self._give_more_time(run, pending, now)
        return effects

    def _release_stuck(
        self, run: int, pending: Pending, now: float, ranks: Iterable[int]
    ) -> list[Effect]:
        new = set(ranks) - pending.released
        pending.released |= new
        return [control(new, Release(run))] if new else []
