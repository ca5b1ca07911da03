"""The state of a recovery: requests for a heal, and the attempt in progress. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from ...wire.messages import Died
from ...wire.stopping import Steps
from .effects import Answer, Effect, HealReport, tell_busy
from .mesh_state import MeshState
from .stopping import describe_steps

# How long a heal waits for a failed run after the release of its ranks, and for ranks' answers.
PATIENCE_S = 5.0


@dataclass
class Attempt:
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
    failures: dict[int, str] = field(default_factory=dict)
    num_respawns: int = 0
    note_to: int = -1
    is_healed: bool = False
    respawned: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    steps: dict[int, Steps] = field(default_factory=dict)

    def report(self, dead: dict[int, Died], apart: int, now: float) -> HealReport:
        """Return the report on the recovery for users.

        Args:
            dead: ranks that are dead now, and how each died.
            apart: the last run whose ranks were stopped at different points; -1 for none.
            now: current time in seconds.
        """
        new = sorted(self.respawned)
        died = [f"rank {rank}, which was new, {dead[rank].reason}" for rank in new if rank in dead]
        return HealReport(
            tuple(rank for rank in new if rank not in dead),
            self.is_healed,
            "; ".join([*self.problems, *died]),
            now - self.began_at,
            tuple(sorted(dead)),
            notes=tuple(self.notes),
            steps=describe_steps(self.steps),
            is_apart=self.note_to >= 0 and self.note_to == apart,
        )


class HealRequests:
    """The user's requests for a heal that wait for a `HealReport`.

    Args:
        mesh: the mesh.

    Attributes:
        waiting: the numbers of the requests.
        patience_ends: time in seconds until which a heal waits for ranks; 0 if the user has stopped
            waiting.
    """

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self.waiting: list[int] = []
        self.patience_ends = 0.0

    def busy(self) -> set[int]:
        """Return the living ranks that run the user's work."""
        return self._mesh.living() & self._mesh.busy(with_heals=False)

    def add(self, request: int, now: float) -> None:
        """Note a request of the user for a heal, and how long the heal may wait for ranks."""
        due = [run.settle_at for run in self._mesh.pending.values() if run.settle_at is not None]
        self.patience_ends = max([now, *due]) + PATIENCE_S
        self.waiting.append(request)

    def can_wait_for(self, ranks: set[int], now: float) -> bool:
        """Return whether a heal can wait for these ranks: they are about to leave a run that has
        failed.
        """
        held, pending = self._mesh.held, self._mesh.pending
        left = {rank for rank in ranks if held.get(rank) in pending}  # the rest have not left it
        return bool(ranks) and now < self.patience_ends and self._mesh.in_failed_runs(ranks - left)

    def can_ask_again(self, silent: set[int], now: float) -> bool:
        """Return whether to probe ranks again that have not answered, as on a busy machine they may
        be late.
        """
        return bool(self.waiting and silent) and now < self.patience_ends

    def refuse(self) -> list[Effect]:
        """Answer all waiting requests with a failure: ranks are still busy."""
        return self.answer(HealReport(failure=tell_busy(self._mesh.running(self.busy()))))

    def answer_without(self, missing: set[int], report: HealReport, now: float) -> list[Effect]:
        """Answer all waiting requests, unless ranks that took no part in the heal are about to
        become free.
        """
        if self.can_wait_for(missing, now):
            return []
        if missing and not report.failure:  # of no interest without a request
            report = dataclasses.replace(report, failure=tell_busy(self._mesh.running(missing)))
        return self.answer(report)

    def answer(self, report: HealReport) -> list[Effect]:
        """Answer all waiting requests for a heal with a report."""
        requests, self.waiting = self.waiting, []
        return [Answer(request, report) for request in requests]
