"""Periodic examination of runs that have not ended: shows users where the ranks of long runs are,
and finds ranks that can never go on. Pure, as `core.Core`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...wire.peer_calls import PEER_RUNS
from ...wire.status import Probe, RankState
from .effects import Effect, Judge, Watch
from .mesh_state import FIRST_HEAL, MeshState, Pending
from .requests import Questions
from .verdict import find_verdict

# When a run's user is first shown where its ranks are, and how often from then on.
WATCH_AFTER_S = 5.0
WATCH_EVERY_S = 1.0
# Of runs that wait for older ones, this many are shown, the newest.
MAX_WATCHED = 16
# How often the runs that have not ended are examined.
SWEEP_S = 0.5


class Sweeps:
    """Periodic questions to the ranks of one mesh: where they are in their runs.

    Args:
        mesh: state of the mesh and of its runs.
        questions: sends requests to ranks.
        settle_s: how long ranks must have waited to count as stuck, in seconds.
        on: handler of run events, called with ``stuck``, a run's number, the run, the time and its
            ranks that are stuck.

    Attributes:
        at: when the next sweep is due; None if no run is in flight.
        is_under_way: whether ranks have been asked and not all have answered.
        came: ranks that have got or ended a run since the last sweep began, so that their answers
            may be out of date.
    """

    def __init__(
        self,
        mesh: MeshState,
        questions: Questions,
        settle_s: float,
        on: Callable[..., list[Effect]],
    ) -> None:
        self._mesh = mesh
        self._questions = questions
        self._settle_s = settle_s
        self._on = on
        self.at: float | None = None
        self.is_under_way = False
        self.came: set[int] = set()

    def begin(self, now: float) -> list[Effect]:
        """Ask all ranks where they are, if a run is due to be shown or examined.

        `_swept` handles the answers.
        """
        self.at = now + SWEEP_S if self._mesh.pending else None
        if self.is_under_way or self._mesh.state != "ready" or not self._runs_to_look_at(now):
            return []
        self.is_under_way = True
        self.came.clear()
        return self._questions.ask(self._mesh.living(), Probe, now, self._swept)

    def _runs_to_look_at(self, now: float) -> list[int]:
        return [
            run
            for run, pending in self._mesh.pending.items()
            if pending.is_sent
            and run < FIRST_HEAL
            and (self._is_to_be_watched(pending, now) or self._is_to_be_judged(run, pending, now))
        ]

    def _is_to_be_watched(self, pending: Pending, now: float) -> bool:
        is_long = now - pending.started_at >= WATCH_AFTER_S and pending.is_work
        return is_long and now - pending.watched_at >= WATCH_EVERY_S - SWEEP_S / 2

    def _is_to_be_judged(self, run: int, pending: Pending, now: float) -> bool:
        """Return whether to examine a run now for ranks that can never go on; false if all of its
        ranks are released from their collectives, or one waits for the user's input. A call that
        waits beside work is examined once a rank has failed: it may wait forever. A call of another
        rank may be on its way to some.
        """
        if pending.ranks <= pending.released or pending.ranks & self._mesh.asking.keys():
            return False
        if not (pending.is_work or (pending.interleaves and pending.has_failed)):
            return False
        is_whole = pending.is_waited_for or len(pending.members) == self._mesh.num_ranks
        is_whole = is_whole and run not in PEER_RUNS
        since, after_s = pending.started_at, self._settle_s if is_whole else WATCH_AFTER_S
        if pending.first_end_at is not None:
            since, after_s = pending.first_end_at, self._settle_s
        is_due = now - pending.judged_at >= WATCH_EVERY_S - SWEEP_S / 2
        return is_due and now - since >= after_s

    def _swept(self, states: dict[int, RankState], now: float) -> list[Effect]:
        self.is_under_way = False
        effects: list[Effect] = []
        runs, with_work = self._runs_to_look_at(now), self._mesh.with_work()
        begun = {state.run for state in states.values()}
        # The oldest run, whose ranks may not answer, and the newest, which the user waits for.
        watched = begun.union(runs[:1], runs[-MAX_WATCHED:])
        for run in runs:
            pending = self._mesh.pending[run]
            if run in begun:
                effects += self._judge(run, states, with_work, now)
            if run in watched and self._is_to_be_watched(pending, now):
                pending.watched_at = now
                left = {r: s for r, s in states.items() if r in pending.ranks}
                effects.append(Watch(run, left))
        return effects

    def _judge(
        self, run: int, states: Mapping[int, RankState], with_work: set[int], now: float
    ) -> list[Effect]:
        """Find ranks of a run that can never go on, report the reason, and release them from their
        collectives.
        """
        pending = self._mesh.pending[run]
        if not self._is_to_be_judged(run, pending, now):
            return []
        pending.judged_at = now
        own = {r: s for r, s in states.items() if r not in pending.ranks or s.run == run}
        # Ranks that may join nevertheless: in a call of another rank, or in one that waits. The
        # latter may begin no collective after those of a run that began later (`CollectiveOrder`).
        newest = {r: max((s.run, *(each.run for each in s.waiting))) for r, s in states.items()}
        serve = {r for r, last in newest.items() if last > (run if r in pending.met else -1)}
        absent = self._mesh.find_absent(pending, with_work) - self.came - serve
        patience_s = max(self._settle_s, SWEEP_S)  # ranks answer at different moments
        verdict = find_verdict(own, absent, self._mesh.num_ranks, patience_s, self._mesh.dead)
        if verdict is None or not (stuck := pending.ranks.intersection(verdict.stuck)):
            return []
        effects: list[Effect] = []
        if not pending.released:
            effects.append(Judge(run, verdict.text + self._mesh.describe_failed(absent)))
        if stuck - pending.released:
            effects += self._on("stuck", run, pending, now, stuck)
        return effects
