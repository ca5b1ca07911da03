"""Brings a mesh back after a failure, between two runs: pure, as `core.Core`.

::

    calm --a run failed, a rank died, counts disagree--> examining
    examining --groups agree, nothing to fork--> calm            (`Resume`)
    examining --dead ranks to replace--> respawning --> examining
    examining --groups broken--> healing, with new ranks by way of describing
    healing --all done--> calm;  healing --somebody failed or died--> examining, twice at most

What happens meanwhile is looked at by examining again before it is calm. Work that is submitted
meanwhile waits until calm, and so does what ranks hold back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

from ...wire.codec import Parcel
from ...wire.messages import (
    Blueprint,
    Describe,
    Died,
    Done,
    Heal,
    Probe,
    RankInfo,
    RankState,
    Release,
    Respawn,
    Resume,
)
from ...wire.ranks import describe_ranks
from .deadlock import Tally, must_be_healed
from .deferring import Deferred, Settle
from .doomed import Doomed
from .effects import Change, Effect, HealReport, Note, Send, describe_heal
from .heal_requests import HealRequests
from .mesh_state import FIRST_HEAL, Board, Pending
from .requests import Questions, control, work

# How long the parts of a recovery may take before it is given up. The agent gives up a fork after a
# minute.
RESPAWN_S = 70.0
HEAL_S = 60.0
ABANDON_S = 5.0
MAX_ATTEMPTS = 3

Phase = Literal["calm", "examining", "respawning", "describing", "healing"]


class Recovery:
    """The recovery of one mesh.

    Args:
        board: the mesh; runs of its own are put among its pending ones.
        questions: asks ranks.
        new_generation: gives numbers that the mesh has not seen.
        auto_heal: whether dead ranks are replaced without being asked.
    """

    def __init__(
        self, board: Board, questions: Questions, new_generation: Callable[[], int], auto_heal: bool
    ) -> None:
        self._board = board
        self._questions = questions
        self._new_generation = new_generation
        self._auto_heal = auto_heal
        self._requests = HealRequests(board)
        self.tally = Tally()
        self._step = 0  # answers to questions of a step that is over are not heard
        # How a run is told that a rank of its will not come after all; `flight.Runs` sets it.
        self.settle: Settle = lambda run, ranks, parcel, now: []
        self._forget()

    def _forget(self) -> None:
        self.phase: Phase = "calm"
        self._step += 1
        self._deadline: float | None = None
        self._again = False
        self.deferred = Deferred(self._board)
        self.tally.clear()
        self.doomed = Doomed(self._board)
        self._newcomers: set[int] = set()  # without groups
        self._outsiders: set[int] = set()  # living, and without a part in the last heal
        self._must_heal = self._is_new_here = False
        self._began_at = 0.0
        self._resumable, self._quiet = set[int](), set[int]()
        self._heal_run = -1
        self._failures: dict[int, str] = {}
        self._start_anew()

    def _start_anew(self) -> None:
        """What is true of one recovery, from calm to calm."""
        self._num_failures = self._num_respawns = 0
        self._note_to = -1
        self._is_healed = False
        self._respawned: set[int] = set()
        self._problems: list[str] = []
        self._notes: dict[str, None] = {}

    # ---- what the core tells

    def is_own(self, run: int) -> bool:
        """Whether a run is one of this recovery's."""
        return run >= FIRST_HEAL

    def reset(self, reason: str) -> list[Effect]:
        """All ranks are new, or gone."""
        for run in [run for run in self._board.pending if self.is_own(run)]:
            del self._board.pending[run]
        self._forget()
        return self._requests.answer(HealReport(failure=reason))

    def before_run(self, ranks: Collection[int], now: float) -> list[Effect]:
        """A run is about to be sent: heal first where its ranks would not meet in their
        collectives.
        """
        if self.phase != "calm":
            return []
        missing = self._board.dead and set(self.doomed.missing()).intersection(ranks)
        if missing and not self._board.in_failed_run(missing):
            return self.begin(now)  # nothing else would
        if not (self._outsiders or self.tally.is_new):
            return []
        idle = self._board.idle()
        groups = self.tally.find_new_disagreements(idle, self._board.num_ranks)
        if self._outsiders & idle & set(ranks) or any(
            set(ranks) >= set(members) for members in groups
        ):
            return self.begin(now)
        return []

    def defer(self, run: int, parcel: Parcel[Any], must_wait: bool) -> bool:
        """Keep a run until the mesh is calm; False if it is, and the run's ranks will be there."""
        if self.phase == "calm" and not must_wait:
            return False
        self.deferred.add(run, parcel)
        return True

    def run_ended(self, run: int, pending: Pending, now: float) -> list[Effect]:
        """A run has ended on all its ranks."""
        if self.is_own(run):
            return self._heal_ended(now) if run == self._heal_run else self.begin(now)
        if not (pending.is_work and pending.is_sent):
            return []
        # Whoever was released or interrupted may have lost its connections, even if its code went
        # on.
        is_suspect = (
            pending.has_failed or bool(pending.released) or pending.interrupted_at is not None
        )
        if is_suspect:
            self._note_to = run
        missing = self.doomed.missing() if self._board.dead else ()
        is_open = self._must_heal or self._newcomers or missing or self.deferred
        if is_suspect or is_open or self._outsiders & set(pending.members) or self.phase != "calm":
            return self.begin(now)
        return []

    def rank_died(self, rank: int) -> None:
        """A rank's process has ended; its runs are told next, then `after_death`."""
        self._must_heal = True
        self.tally.forget([rank])
        self._board.news.forget([rank])
        self._newcomers.discard(rank)
        self._outsiders.discard(rank)
        if self._auto_heal:
            self.doomed.add([rank])
        elif self._requests:  # the user may have seen it before it was told here
            self.doomed.ask_for([rank])
        self._again = self.phase != "calm"

    def after_death(self, rank: int, now: float) -> list[Effect]:
        """The runs of a rank that died have been told; they are to end first."""
        if self.phase != "calm" or self._board.in_failed_run({rank}):
            return []
        return self.begin(now)

    def store_moved(self, now: float) -> list[Effect]:
        """The c10d store is a new one: groups are to be made over it."""
        self._must_heal = True
        return self.begin(now)

    def rank_left_heal(self, run: int, ranks: tuple[int, ...], verb: Any) -> list[Effect]:
        """Some ranks have ended a run of ours; where it went well they have groups, and go on."""
        if type(verb) is Done:
            self._newcomers.difference_update(ranks)
            self._notes.update(dict.fromkeys(verb.notes))
            for rank in ranks:
                self._board.held.pop(rank, None)
        if run != self._heal_run or type(verb) is Done:
            return []
        for rank in ranks:
            self._failures[rank] = (
                verb.reason if type(verb) is Died else verb.text or verb.type_name
            )
        return self._release(self._board.pending[run])

    def respawned(self, ranks: tuple[RankInfo, ...], now: float) -> list[Effect]:
        """Dead ranks are there again, without groups."""
        new = {info.rank: info for info in ranks}
        self._board.ranks = tuple(new.get(info.rank, info) for info in self._board.ranks)
        for rank in new:
            self._board.dead.pop(rank, None)
        self._newcomers |= new.keys()
        self._respawned |= new.keys()
        self.doomed.spare(new)
        return self._examine(now) if self.phase == "respawning" else self.begin(now)

    def respawn_failed(self, ranks: tuple[int, ...], text: str, now: float) -> list[Effect]:
        """Dead ranks could not be forked: those that live are healed without them."""
        self.doomed.spare(ranks)
        if self.phase != "respawning":
            return []
        self._problems.append(f"{describe_ranks(ranks)} could not be started: {text}")
        return self._examine(now)

    def heal(self, request: int, now: float) -> list[Effect]:
        """The user wants dead ranks replaced and groups rebuilt; who is to be released is waited
        for.
        """
        self._requests.add(request, now)
        busy = self._requests.busy()
        must_wait = self._requests.can_wait_for(busy, now)
        if busy and self.phase == "calm" and not must_wait:
            return self._requests.refuse()
        self._board.news.forget()  # the answer tells
        self.doomed.ask_for(self._board.dead)
        return [] if must_wait else self.begin(now)

    def abandon(self, now: float) -> list[Effect]:
        """The user no longer wants to wait for a heal."""
        if self.phase == "calm":
            return self._refuse(now)
        self._requests.stop_asking_again()
        pending = self._board.pending.get(self._heal_run)
        if pending is None:
            return []
        self._num_failures = MAX_ATTEMPTS
        self._deadline = now + ABANDON_S
        return self._release(pending)

    def resume_all(self, now: float) -> list[Effect]:
        """A controller has attached and does not know who holds back, nor what was healed."""
        self._board.held = dict.fromkeys(self._board.living(), -1)
        self._must_heal, self._is_new_here = bool(self._board.dead), True
        self.doomed.add(self._board.dead if self._auto_heal else ())
        return self.begin(now)

    def _refuse(self, now: float) -> list[Effect]:
        """Nobody waits any longer for ranks to leave a run that has failed."""
        self.doomed.withdraw()
        effects = self._requests.refuse()
        return (
            effects
            if self.doomed.missing()
            else [*effects, *self.deferred.send_all(now, self.settle)]
        )

    def tick(self, now: float) -> list[Effect]:
        """Give up what takes too long."""
        due = self.deadline()
        if due is None or now < due:
            return []
        if self.phase == "calm":
            return self._refuse(now)
        if self.phase == "respawning":
            return self.respawn_failed(self.doomed.missing(), "it took too long", now)
        pending = self._board.pending[self._heal_run]
        if not pending.released:
            self._deadline = now + ABANDON_S
            return self._release(pending)
        # It stays among the pending runs: when its ranks have left it after all, they are looked
        # at.
        self._heal_run, self._must_heal = -1, True
        return self._give_up(f"{describe_ranks(pending.ranks)} took too long", now)

    def deadline(self) -> float | None:
        """When to call `tick` at the latest."""
        return self._requests.deadline() if self.phase == "calm" else self._deadline

    # ---- the phases

    def _enter(self, phase: Phase, deadline: float | None = None) -> None:
        self.phase, self._deadline = phase, deadline
        self._step += 1

    def begin(self, now: float) -> list[Effect]:
        """Something may not be as it should: look, now or once more."""
        if self._board.state != "ready":
            return []
        if self.phase != "calm":
            self._again = True
            return []
        self._began_at = now
        return self._examine(now)

    def _examine(self, now: float) -> list[Effect]:
        self._enter("examining")
        self._again = False
        self._resumable = {rank for rank in self._board.held if self._board.may_go_on(rank)}
        step = self._step
        return self._questions.ask(
            self._board.living(), Probe, now, lambda states, now: self._examined(step, states, now)
        )

    def _examined(self, step: int, states: dict[int, RankState], now: float) -> list[Effect]:
        if step != self._step:
            return []
        living, held = self._board.living(), self._board.held
        # A rank may answer between the end of a run, which it has sent, and its next wait for work.
        ended = {
            r
            for r, state in states.items()
            if state.run >= 0 and state.run not in self._board.pending
        }
        if self._requests.can_ask_again((living - states.keys()) | (living & ended), now):
            return self._examine(now)
        idle = {rank for rank, state in states.items() if state.run < 0} & living
        unsure = {rank for rank, run in held.items() if run < 0}
        for rank in unsure & (states.keys() - idle):
            del held[rank]  # whoever runs something does not hold back
        unsure &= self._board.with_work()  # about to begin, or holding back
        self._quiet = idle - self._board.busy() - unsure - (held.keys() - self._resumable)
        if self._num_respawns == MAX_ATTEMPTS:
            self.doomed.clear()
        if (missing := self.doomed.missing()) and self._quiet >= living:
            self._num_respawns += 1
            self._enter("respawning", now + RESPAWN_S)
            return [Send(Parcel(Respawn(missing)))]
        self._newcomers |= {rank for rank in idle if self._is_new_here and not states[rank].counts}
        self._is_new_here = False
        old = living - self._newcomers
        if old and not self._quiet & old:
            self._quiet.clear()  # nobody could tell the new ones which groups there are
        for rank in self._quiet:
            self.tally.replace(rank, states[rank].counts)
        is_open = (
            self._must_heal
            or self._quiet & self._newcomers
            or (self._outsiders and self._quiet >= living)
        )
        quiet = {rank: states[rank] for rank in self._quiet}
        if quiet and (is_open or must_be_healed(quiet, self._board.num_ranks)):
            return self._describe(now)
        return self._finish(now)

    def _describe(self, now: float) -> list[Effect]:
        """New ranks need to know which groups there are; others can be healed at once."""
        old = sorted(self._quiet - self._newcomers)
        if not self._quiet & self._newcomers or not old:
            return self._start_heal(b"", now)
        self._enter("describing")
        step, rank = self._step, old[self._num_failures % len(old)]
        return self._questions.ask(
            [rank], Describe, now, lambda told, now: self._described(step, told, now)
        )

    def _described(self, step: int, answers: dict[int, Blueprint], now: float) -> list[Effect]:
        if step != self._step:
            return []
        if not answers:
            return self._try_again("a rank did not tell of its groups", now)
        (blueprint,) = answers.values()
        return self._start_heal(blueprint.data, now)

    def _start_heal(self, blueprint: bytes, now: float) -> list[Effect]:
        self._quiet -= self._board.dead.keys()
        ranks = tuple(sorted(self._quiet))
        if not ranks:
            return self._finish(now)
        generation = self._new_generation()
        self._heal_run = run = (
            FIRST_HEAL + generation
        )  # another controller's must not be taken for it
        self._enter("healing", now + HEAL_S)
        self._failures.clear()
        self._must_heal = False
        self._board.pending[run] = Pending(ranks, set(ranks), now, watched_at=now)
        dims, port = self._board.dims, self._board.store_port
        heal = Heal(run, generation, ranks, blueprint, tuple(dims), tuple(dims.values()), port)
        return [work(ranks, heal, run)]

    def _release(self, pending: Pending) -> list[Effect]:
        left = pending.ranks - pending.released
        pending.released |= left
        return [control(left, Release(self._heal_run))] if left else []

    def _heal_ended(self, now: float) -> list[Effect]:
        self._heal_run = -1
        if self._failures:
            self._must_heal = True
            text = "; ".join(f"rank {rank} {why}" for rank, why in sorted(self._failures.items()))
            return self._try_again(text, now)
        self._is_healed = True
        self.tally.forget(self._quiet)
        self._outsiders = self._board.living() - self._quiet
        return self._finish(now)

    def _try_again(self, text: str, now: float) -> list[Effect]:
        self._num_failures += 1
        return self._examine(now) if self._num_failures < MAX_ATTEMPTS else self._give_up(text, now)

    def _give_up(self, text: str, now: float) -> list[Effect]:
        self.doomed.clear()
        self._problems.append(
            f"{text}. What the ranks hold is there, their process groups are not: `%dist_heal` "
            "tries again, `%dist_restart` replaces all ranks"
        )
        return self._finish(now)

    def _finish(self, now: float) -> list[Effect]:
        """Calm again: let go on what has waited."""
        if self._again:
            return self._examine(now)
        self._enter("calm")
        effects: list[Effect] = []
        if resumed := self._board.let_go(self._resumable):
            effects.append(work(resumed, Resume(), -1))
        dead, new = self._board.dead, sorted(self._respawned)
        self._problems += [
            f"rank {rank}, which was new, {dead[rank].reason}" for rank in new if rank in dead
        ]
        respawned = tuple(rank for rank in new if rank not in dead)
        problems, took_s = "; ".join(self._problems), now - self._began_at
        report = HealReport(
            respawned,
            self._is_healed,
            problems,
            took_s,
            tuple(sorted(dead)),
            notes=tuple(self._notes),
        )
        if report.healed or report.failure:
            if self._note_to >= 0:
                effects.append(Note(self._note_to, describe_heal(report)))
            effects.append(Change(self._board.state, report))
        if self._note_to < 0 and not self._requests:  # nobody was told
            self._board.news.add(info for info in self._board.ranks if info.rank in respawned)
        effects += self._requests.answer_without(self._board.living() - self._quiet, report, now)
        self._start_anew()
        return [*effects, *self.deferred.send_all(now, self.settle)]
