"""Who has asked for a heal, and for how long ranks that are about to be released are waited for.
Pure.
"""

from __future__ import annotations

import dataclasses

from .effects import Answer, Effect, HealReport, tell_busy
from .mesh_state import Board

# How long a heal waits for a run that has failed, from when its ranks are released, and for ranks'
# answers.
PATIENCE_S = 5.0


class HealRequests:
    """The questions that a `HealReport` answers.

    Args:
        board: the mesh.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._requests: list[int] = []
        self._patience_ends = 0.0

    def __bool__(self) -> bool:
        return bool(self._requests)

    def busy(self) -> set[int]:
        """The living ranks that run the user's work."""
        return self._board.living() & self._board.busy(with_heals=False)

    def add(self, request: int, now: float) -> None:
        """Somebody asks."""
        due = [run.settle_at for run in self._board.pending.values() if run.settle_at is not None]
        self._patience_ends = max([now, *due]) + PATIENCE_S
        self._requests.append(request)

    def can_wait_for(self, ranks: set[int], now: float) -> bool:
        """Whether these ranks are about to leave what they run: somebody has failed in it."""
        held, pending = self._board.held, self._board.pending
        left = {
            rank for rank in ranks if held.get(rank) in pending
        }  # their run, but others have not
        return (
            bool(ranks) and now < self._patience_ends and self._board.in_failed_runs(ranks - left)
        )

    def can_ask_again(self, silent: set[int], now: float) -> bool:
        """Whether to ask ranks again that have not answered: a busy machine may keep them from
        it.
        """
        return bool(self._requests and silent) and now < self._patience_ends

    def stop_asking_again(self) -> None:
        """Nobody wants to wait for ranks' answers any longer."""
        self._patience_ends = 0.0

    def deadline(self) -> float | None:
        """Until when they wait, where there is nothing else to wait for."""
        return self._patience_ends if self._requests else None

    def refuse(self) -> list[Effect]:
        """Ranks are busy still."""
        return self.answer(HealReport(failure=tell_busy(self._board.running(self.busy()))))

    def answer_without(self, missing: set[int], report: HealReport, now: float) -> list[Effect]:
        """All have their answer, unless the ranks that had no part in it are waited for."""
        if self.can_wait_for(missing, now):
            return []
        if missing and not report.failure:  # only who asked for it needs to know
            report = dataclasses.replace(report, failure=tell_busy(self._board.running(missing)))
        return self.answer(report)

    def answer(self, report: HealReport) -> list[Effect]:
        """All have their answer."""
        requests, self._requests = self._requests, []
        return [Answer(request, report) for request in requests]
