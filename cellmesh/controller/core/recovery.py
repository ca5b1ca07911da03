"""Brings a mesh back after a failure, between two runs. Pure, as `core.Core`.

The table `transitions.RECOVERY` has the action for each event in each phase. After an event during
a recovery, the ranks are examined once more before the recovery ends. Work that is submitted
during a recovery, or that ranks hold back, waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from ...wire.codec import Parcel
from ...wire.groups import Blueprint, Describe, Heal
from ...wire.messages import Control, Died, Done, Release, Respawn, Resume
from ...wire.ranks import describe_ranks
from ...wire.status import Probe, RankInfo, RankState
from ...wire.stopping import Steps
from .effects import (
    Answer,
    Change,
    Effect,
    HealReport,
    Note,
    Send,
    describe_heal,
    describe_reset,
    tell_busy,
)
from .group_progress import Tally, must_be_healed
from .mesh_state import FIRST_HEAL, MeshState, Pending
from .requests import OnAnswers, Questions, control, work
from .stopping import describe_steps
from .transitions import RECOVERY, RecoveryEvent, RecoveryPhase, Transition, add_transition

# Time limits of a heal, and of its end once its ranks were released. The agent limits forks.
HEAL_S, ABANDON_S = 60.0, 5.0
# How long a heal waits for a failed run after the release of its ranks, and for ranks' answers.
PATIENCE_S = 5.0
# How long a heal waits for the ranks of a host that has returned: those that still execute a run,
# which has ended for the controller, are interrupted.
RETURN_S = 30.0
MAX_ATTEMPTS = 3


class Attempt(msgspec.Struct):
    """The record of one recovery: what was tried, what failed, which ranks were replaced.

    Attributes:
        began_at: when it began, in seconds.
        num_failures: how often healing has failed.
        failures: rank -> why the heal in progress has failed on it.
        num_respawns: how often dead ranks were to be replaced.
        note_to: the failed run whose output gets the note on the recovery; -1 for none.
        is_healed: whether process groups were rebuilt.
        respawned: the ranks that were replaced.
        problems: failures, as texts for users.
        notes: reports of ranks on their models.
        steps: rank -> the steps of its optimizers in the run of `note_to`.
    """

    began_at: float = 0.0
    num_failures: int = 0
    failures: dict[int, str] = msgspec.field(default_factory=dict)
    num_respawns: int = 0
    note_to: int = -1
    is_healed: bool = False
    respawned: set[int] = msgspec.field(default_factory=set)
    problems: list[str] = msgspec.field(default_factory=list)
    notes: dict[str, None] = msgspec.field(default_factory=dict)
    steps: dict[int, Steps] = msgspec.field(default_factory=dict)

    def report(self, mesh: MeshState, now: float) -> HealReport:
        """Return the report on the recovery for users.

        Args:
            mesh: state of the mesh.
            now: current time in seconds.
        """
        new, dead = sorted(self.respawned), mesh.dead
        died = [f"rank {rank}, which was new, {dead[rank].reason}" for rank in new if rank in dead]
        return HealReport(
            tuple(rank for rank in new if rank not in dead),
            self.is_healed,
            "; ".join([*self.problems, *died]),
            now - self.began_at,
            tuple(sorted(dead)),
            notes=tuple(self.notes),
            steps=describe_steps(self.steps),
            is_apart=self.note_to >= 0 and self.note_to == mesh.apart,
            num_ranks=mesh.num_ranks,
            is_supervised=bool(new) and mesh.supervised.issuperset(new),
        )


class Recovery:
    """The state machine that brings a mesh back after a failure: replaces dead ranks and rebuilds
    process groups.

    Args:
        mesh: state of the mesh; heals are added to its pending runs.
        questions: sends requests to ranks.
        new_generation: returns a number that no earlier heal of the mesh has used.
        auto_heal: whether dead ranks are replaced without a request of the user.
    """

    def __init__(
        self,
        mesh: MeshState,
        questions: Questions,
        new_generation: Callable[[], int],
        auto_heal: bool,
    ) -> None:
        self._mesh = mesh
        self._questions = questions
        self._new_generation = new_generation
        self._auto_heal = auto_heal
        self._waiting: list[int] = []  # the user's requests for a heal
        self._patience_ends = 0.0  # until then a heal waits for ranks
        self._awaiting: list[int] = []  # requests to answer at its end
        self.tally = Tally()
        self.phase: RecoveryPhase = "calm"
        self._step = 0  # how many phases have been entered
        self._deadline: float | None = None
        self.send_deferred: Callable[[float], list[Effect]]  # `Runs` sets it
        self._forget(0.0)

    def _forget(self, now: float) -> list[Effect]:
        self._again = False
        self._mesh.deferred, self._mesh.to_replace, self._mesh.asked = {}, set(), set()
        self._mesh.supervised = set()
        self.tally.clear()
        self._newcomers: set[int] = set()  # ranks without groups
        # Living ranks that took no part in the last heal, or did not answer when examined.
        self._outsiders: set[int] = set()
        self._must_heal = self._is_new_here = self._is_resizing = False
        self._resumable, self._quiet = set[int](), set[int]()
        self._heal_run, self._keeps_groups = -1, False
        self._attempt = Attempt()
        return []

    # ---- events from the core

    def reset(self, reason: str, now: float) -> list[Effect]:
        """Give up the recovery, as all ranks are new or have ended."""
        for run in [run for run in self._mesh.pending if run >= FIRST_HEAL]:
            del self._mesh.pending[run]
        self.on("reset", now)
        return [*self._answer(HealReport(failure=reason)), *self._tell_calm("")]

    def before_run(self, ranks: Collection[int], now: float) -> list[Effect]:
        """Begin a recovery before a run if some of its ranks must be replaced, or if their next
        collectives would not match.
        """
        if self.phase != "calm":
            return []
        missing = self._mesh.missing().intersection(ranks) if self._mesh.dead else set()
        if missing and not self._mesh.in_failed_run(missing):
            return self.begin(now)  # no other event would begin it
        if not (self._outsiders or self.tally.is_new):
            return []
        idle = self._mesh.idle()
        groups = self.tally.find_new_disagreements(idle, self._mesh.num_ranks)
        meets_outsiders = self._outsiders & idle & set(ranks)
        if meets_outsiders or any(set(ranks) >= set(members) for members in groups):
            return self.begin(now)
        return []

    def run_ended(self, run: int, pending: Pending, now: float) -> list[Effect]:
        """Handle the end of a run on all its ranks."""
        if run >= FIRST_HEAL:
            return self._heal_ended(now) if run == self._heal_run else self.begin(now)
        if not ((pending.is_work or pending.interleaves) and pending.is_sent):
            return []
        # A rank that was released or interrupted may have lost its connections, even if its code
        # went on.
        was_stopped = pending.released or pending.interrupted_at is not None
        is_suspect = pending.has_failed or was_stopped
        if is_suspect:
            self._attempt.note_to = run
        is_open = self._must_heal or self._newcomers or self._mesh.deferred or self.phase != "calm"
        missing = self._mesh.dead and self._mesh.missing()
        is_open = is_open or bool(self._outsiders & set(pending.members))
        if is_suspect or is_open or missing or self._waiting:
            return self.begin(now)
        return []

    def rank_died(self, rank: int) -> None:
        """Record that a rank's process has ended; `after_deaths` is called once its runs have ended
        on it.
        """
        self._must_heal = True
        self.tally.forget([rank])
        self._mesh.forget_news([rank])
        self._newcomers.discard(rank)
        self._outsiders.discard(rank)
        if self._auto_heal:
            self._mesh.to_replace.add(rank)
        elif self._waiting:  # the user may know of the death before this message
            self._mesh.asked.add(rank)
        self._again = self.phase != "calm"

    def after_deaths(self, ranks: Collection[int], now: float) -> list[Effect]:
        """Handle the deaths of ranks, once their runs have ended on them: begin a recovery."""
        if self.phase != "calm" or self._mesh.in_failed_run(set(ranks)):
            return []
        return self.begin(now)

    def store_moved(self, now: float) -> list[Effect]:
        """Handle the replacement of the c10d store: groups must be rebuilt over the new one."""
        self._must_heal = True
        return self.begin(now)

    def rank_left_heal(self, run: int, ranks: tuple[int, ...], verb: Any) -> list[Effect]:
        """Handle the end of a heal on some ranks."""
        if type(verb) is Done:
            self._newcomers.difference_update(ranks)
            self._attempt.notes.update(dict.fromkeys(verb.notes))
            for rank in ranks:
                self._mesh.held.pop(rank, None)
        if run != self._heal_run or type(verb) is Done:
            return []
        for rank in ranks:
            died = type(verb) is Died
            self._attempt.failures[rank] = verb.reason if died else verb.text or verb.type_name
        return self._release(self._mesh.pending[run])

    def respawned(self, ranks: tuple[RankInfo, ...], now: float) -> list[Effect]:
        """Handle new processes, without groups, that the agent has forked for dead ranks."""
        new = self._mesh.revive(ranks)
        self._newcomers |= new
        self._attempt.respawned |= new
        self._mesh.spare(new)
        return self.on("respawned", now) if self.phase == "respawning" else self.begin(now)

    def returned(self, ranks: tuple[RankInfo, ...], now: float) -> list[Effect]:
        """Handle the return of a host that counted as lost: these ranks on it are alive and have
        kept their state.
        """
        found = self._mesh.revive(ranks)
        self._mesh.held |= dict.fromkeys(found, -1)
        self._mesh.spare(found)
        self._must_heal = True
        self._patience_ends = now + RETURN_S
        return self.begin(now)

    def respawn_failed(self, ranks: tuple[int, ...], text: str, now: float) -> list[Effect]:
        """Handle the failure to fork dead ranks again: the others are healed without them."""
        self._mesh.spare(ranks)
        problem = f"{describe_ranks(ranks)} could not be started: {text}"
        return self.on("respawn failed", now, problem)

    def heal(self, request: int, now: float) -> list[Effect]:
        """Replace dead ranks and rebuild process groups for the user, once the ranks that are about
        to leave a failed run have left it.

        Args:
            request: number of the user's request.
            now: current time in seconds.
        """
        self._add_request(request, now)
        busy = self._mesh.living() & self._mesh.busy(with_heals=False)
        must_wait = self._can_wait_for(busy, now)
        if busy and self.phase == "calm" and not must_wait:
            return self._answer(HealReport(failure=tell_busy(self._mesh.running(busy))))
        self._mesh.news.clear()  # the answer has them
        self._mesh.asked.update(self._mesh.dead)
        return [] if must_wait else self.begin(now)

    def resize(self, request: int, new: Collection[int], now: float) -> list[Effect]:
        """Fork the new ranks of a resized mesh, and make process groups of its new size.

        Args:
            request: number of the user's request.
            new: ranks to fork.
            now: current time in seconds.
        """
        self._add_request(request, now)
        self.tally.clear()
        self._outsiders.clear()
        self._must_heal = self._is_resizing = True
        self._mesh.asked.update(new)
        return self.begin(now)

    def await_calm(self, request: int) -> list[Effect]:
        """Answer a request once no recovery is in progress, with the note on the recovery or ""."""
        self._awaiting.append(request)
        return self._tell_calm("") if self.phase == "calm" else []

    def resume_all(self, now: float) -> list[Effect]:
        """Let all ranks execute their queued runs after an attach, as the new controller does not
        know which ranks hold back runs.
        """
        self._mesh.held = dict.fromkeys(self._mesh.living(), -1)
        self._must_heal, self._is_new_here = bool(self._mesh.dead), True
        self._mesh.to_replace.update(self._mesh.dead if self._auto_heal else ())
        return self.begin(now)

    @property
    def is_at_rest(self) -> bool:
        """Whether no recovery is in progress or requested, so that `tick` has nothing to do."""
        return self.phase == "calm" and not self._waiting

    def tick(self, now: float) -> list[Effect]:
        """Give up a phase of the recovery whose time limit has passed."""
        due = self.deadline()
        return [] if due is None or now < due else self.on("timed out", now)

    def deadline(self) -> float | None:
        """Return when to call `tick` at the latest, in seconds; None if no deadline is set."""
        if self.phase != "calm":
            return self._deadline
        return self._patience_ends if self._waiting else None

    # ---- the phases

    def begin(self, now: float) -> list[Effect]:
        """Begin a recovery by examining the ranks, or have one in progress examine them again."""
        return self.on("trouble", now) if self._mesh.state == "ready" else []

    def on(self, event: RecoveryEvent, now: float, *args: Any) -> list[Effect]:
        """Carry out the action of the table `RECOVERY` for an event in the present phase, if any.

        Args:
            event: the event.
            now: current time in seconds.
            *args: arguments of the action.
        """
        before = self.phase
        if (before, event) not in RECOVERY:
            return []
        phase, action = RECOVERY[before, event]
        if phase is not None:
            self.phase = phase
            self._deadline = now + HEAL_S if phase == "healing" else None
            self._step += 1
        new = Transition(now, "recovery", before, event, self.phase)
        add_transition(self._mesh.transitions, new)
        effects: list[Effect] = getattr(self, f"_{action}")(now, *args)
        return effects

    def _ask(
        self, ranks: Collection[int], verb: Callable[[int], Control], now: float, then: OnAnswers
    ) -> list[Effect]:
        """Send a request to ranks, and call `then` with the answers unless the recovery is in
        another phase by then.
        """
        step = self._step

        def answered(answers: dict[int, Any], now: float) -> list[Effect]:
            return then(answers, now) if step == self._step else []

        return self._questions.ask(ranks, verb, now, answered)

    def _begin(self, now: float) -> list[Effect]:
        self._attempt.began_at = now
        return self._examine(now)

    def _look_again(self, now: float) -> list[Effect]:
        self._again = True
        return []

    def _refuse(self, now: float) -> list[Effect]:
        """Stop waiting for ranks to leave a failed run, and answer the user's requests to heal with
        the error that these ranks are busy.
        """
        self._mesh.asked.clear()
        busy = self._mesh.living() & self._mesh.busy(with_heals=False)
        effects = self._answer(HealReport(failure=tell_busy(self._mesh.running(busy))))
        return effects if self._mesh.missing() else [*effects, *self.send_deferred(now)]

    def _examine(self, now: float, problem: str = "") -> list[Effect]:
        if problem:
            self._attempt.problems.append(problem)
        self._again = False
        self._resumable = {rank for rank in self._mesh.held if self._mesh.may_go_on(rank)}
        return self._ask(self._mesh.living(), Probe, now, self._examined)

    def _examined(self, states: dict[int, RankState], now: float) -> list[Effect]:
        living = self._mesh.living()
        # A rank may answer between the end of a run, which it has sent, and its next wait for work.
        pending, is_idle = self._mesh.pending, self._mesh.is_idle
        settled = {r for r, s in states.items() if s.run in pending or is_idle(s)}
        # On a busy machine ranks may be late to answer. Those in a call of another rank that has
        # failed elsewhere leave it or report it at once, and others must not begin the next.
        left = {state.run for state in states.values()} - pending.keys()
        lags = left & {*self._mesh.failed_calls} and now < self._attempt.began_at + PATIENCE_S
        if lags or (living - settled and now < self._patience_ends):
            return self.on("no answer", now)
        # Without an answer, it is not known whether their connections were cut.
        self._outsiders |= living - states.keys() - self._mesh.busy()
        idle = {rank for rank, state in states.items() if is_idle(state)} & living
        for rank in idle:
            if states[rank].steps.run == self._attempt.note_to:
                self._attempt.steps[rank] = states[rank].steps
        self._quiet = self._mesh.find_quiet(states, self._resumable)
        if self._attempt.num_respawns == MAX_ATTEMPTS:
            self._mesh.spare(range(self._mesh.num_ranks))
        is_whole = self._quiet >= living
        if self._mesh.missing() and is_whole:
            return self.on("ranks missing", now)
        self._newcomers |= {rank for rank in idle if self._is_new_here and not states[rank].counts}
        self._is_new_here = False
        old = living - self._newcomers
        if old and not self._quiet & old:
            self._quiet.clear()  # no rank could describe the groups to the new ones
        for rank in self._quiet:
            self.tally.replace(rank, states[rank].counts)
        new = self._quiet & self._newcomers
        is_open = self._must_heal or new or (self._outsiders and is_whole)
        quiet = {rank: states[rank] for rank in self._quiet}
        if quiet and (is_open or must_be_healed(quiet, self._mesh.num_ranks)):
            # In a resize, all ranks make the groups that a mesh of the new size begins with.
            is_mixed = new and new != self._quiet and not self._is_resizing
            return self.on("ranks without groups" if is_mixed else "groups broken", now)
        if any(state.is_half_done for state in quiet.values()):
            return self.on("models half done", now, b"", True)
        return self._finish(now)

    def _respawn(self, now: float) -> list[Effect]:
        self._attempt.num_respawns += 1
        return [Send(Parcel(Respawn(tuple(sorted(self._mesh.missing())))))]

    def _describe(self, now: float) -> list[Effect]:
        """Ask a living rank for its process groups (`Blueprint`), so that new ranks can make the
        same groups.
        """
        old = sorted(self._quiet - self._newcomers)
        rank = old[self._attempt.num_failures % len(old)]
        return self._ask([rank], Describe, now, self._described)

    def _described(self, answers: dict[int, Blueprint], now: float) -> list[Effect]:
        if not answers:
            return self._try_again("a rank did not describe its groups", now)
        self._quiet -= self._mesh.dead.keys()
        if not self._quiet:
            return self._finish(now)
        (blueprint,) = answers.values()
        return self.on("groups broken", now, blueprint.data)

    def _heal(self, now: float, blueprint: bytes = b"", keeps_groups: bool = False) -> list[Effect]:
        mesh, ranks, self._keeps_groups = self._mesh, tuple(sorted(self._quiet)), keeps_groups
        generation = self._new_generation()  # must differ from those of other controllers
        self._heal_run = run = FIRST_HEAL + generation
        self._attempt.failures.clear()
        self._must_heal = False
        mesh.pending[run] = Pending(ranks, set(ranks), now, now, now)
        dims = tuple(mesh.dims), tuple(mesh.dims.values())
        store = mesh.store_port, mesh.store_address
        size = mesh.num_resizes, mesh.layout if mesh.num_resizes else ()
        heal = Heal(run, generation, ranks, blueprint, *dims, *store, *size, keeps_groups)
        return [work(ranks, heal, run)]

    def _heal_timed_out(self, now: float) -> list[Effect]:
        """Release ranks that take too long to heal from the collectives in which they wait; at the
        second timeout, give up the heal.
        """
        pending = self._mesh.pending[self._heal_run]
        if not pending.released:
            if self._mesh.serving() & pending.ranks:  # calls that began just before the heal
                self._deadline = now + HEAL_S
                return []
            self._deadline = now + ABANDON_S
            return self._release(pending)
        # The heal stays pending: once its ranks have left it after all, they are examined.
        self._heal_run, self._must_heal = -1, True
        return self._give_up(f"{describe_ranks(pending.ranks)} took too long", now)

    def _stop_asking(self, now: float) -> list[Effect]:
        self._patience_ends = 0.0
        return []

    def _call_off(self, now: float) -> list[Effect]:
        """Release the ranks of the heal in progress from the collectives in which they wait, and
        start no further heal.
        """
        self._stop_asking(now)
        self._attempt.num_failures = MAX_ATTEMPTS
        self._deadline = now + ABANDON_S
        return self._release(self._mesh.pending[self._heal_run])

    def _release(self, pending: Pending) -> list[Effect]:
        left = pending.ranks - pending.released
        pending.released |= left
        return [control(left, Release(self._heal_run))] if left else []

    def _heal_ended(self, now: float) -> list[Effect]:
        self._heal_run = -1
        if failures := sorted(self._attempt.failures.items()):
            self._must_heal = True
            return self._try_again("; ".join(f"rank {rank} {why}" for rank, why in failures), now)
        if not self._keeps_groups:
            self._attempt.is_healed = True
            self._is_resizing = self._is_resizing and self._quiet < self._mesh.living()
            self.tally.forget(self._quiet)
            self._outsiders = self._mesh.living() - self._quiet
        return self._finish(now, "healed")

    def _try_again(self, text: str, now: float) -> list[Effect]:
        self._attempt.num_failures += 1
        is_last = self._attempt.num_failures >= MAX_ATTEMPTS
        return self._give_up(text, now) if is_last else self.on("failed", now)

    def _give_up(self, text: str, now: float) -> list[Effect]:
        self._mesh.spare(range(self._mesh.num_ranks))
        self._attempt.problems.append(
            f"{text}. What the ranks hold is there, their process groups are not: `%dist_heal` "
            "tries again, `%dist_restart` replaces all ranks"
        )
        return self._finish(now, "given up")

    def _finish(self, now: float, event: RecoveryEvent = "all well") -> list[Effect]:
        return self.on("looked too early" if self._again else event, now)

    def _calm_down(self, now: float) -> list[Effect]:
        """End the recovery, and send the runs that were submitted during it."""
        effects: list[Effect] = []
        if resumed := self._mesh.let_go(self._resumable):
            effects.append(work(resumed, Resume(), -1))
        attempt, self._attempt = self._attempt, Attempt()
        report = attempt.report(self._mesh, now)
        text, is_change = "", bool(report.healed or report.failure)
        if attempt.note_to >= 0:
            text = describe_heal(report) if is_change else describe_reset(report)
        if text:
            effects.append(Note(attempt.note_to, text))
        if is_change:
            effects.append(Change(self._mesh.state, report))
        # The user may miss a note after its cell's end, but not the answer to a request.
        news = {*report.respawned} - self._mesh.supervised
        self._mesh.supervised -= attempt.respawned
        if not self._waiting:
            self._mesh.add_news(one for one in self._mesh.ranks if one.rank in news)
        without = self._mesh.living() - self._quiet
        if not self._can_wait_for(without, now):
            if without and not report.failure:  # of no interest without a request
                failure = tell_busy(self._mesh.running(without))
                report = msgspec.structs.replace(report, failure=failure)
            effects += self._answer(report)
        return [*effects, *self._tell_calm(text), *self.send_deferred(now)]

    # ---- requests of the user for a heal

    def _add_request(self, request: int, now: float) -> None:
        due = [run.settle_at for run in self._mesh.pending.values() if run.settle_at is not None]
        self._patience_ends = max(self._patience_ends, max([now, *due]) + PATIENCE_S)
        self._waiting.append(request)

    def _can_wait_for(self, ranks: set[int], now: float) -> bool:
        """Return whether a heal can wait for these ranks: they are about to leave a run that has
        failed.
        """
        held, pending = self._mesh.held, self._mesh.pending
        left = {rank for rank in ranks if held.get(rank) in pending}  # the rest have not left it
        return bool(ranks) and now < self._patience_ends and self._mesh.in_failed_runs(ranks - left)

    def _answer(self, report: HealReport) -> list[Effect]:
        requests, self._waiting = self._waiting, []
        self._stop_asking(0.0)
        return [Answer(request, report) for request in requests]

    def _tell_calm(self, text: str) -> list[Effect]:
        requests, self._awaiting = self._awaiting, []
        return [Answer(request, text) for request in requests]
