"""The state of a recovery: ranks to replace, runs that wait, requests for a heal, and the attempt
in progress. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...wire.codec import Parcel
from ...wire.messages import Died, Relay
from ...wire.stopping import Steps
from .effects import Answer, Effect, HealReport, Send, tell_busy
from .mesh_state import MeshState
from .stopping import describe_steps, find_step_differences

# How long a heal waits for a run that has failed, from when its ranks are released, and for ranks'
# answers.
PATIENCE_S = 5.0

# Tells a run how some of its ranks have ended it: run, ranks, what they said, seconds.
Settle = Callable[[int, tuple[int, ...], Parcel[Any], float], list[Effect]]


@dataclass
class Attempt:
    """The record of one recovery: what was tried, what failed, which ranks were replaced.

    Attributes:
        began_at: when, in seconds.
        num_failures: how often healing has failed.
        failures: rank -> why the heal under way has failed on it.
        num_respawns: how often dead ranks were to be replaced.
        note_to: the failed run whose output says what was done; -1 for none.
        is_healed: whether process groups were rebuilt.
        respawned: the ranks that were replaced.
        problems: what did not work out.
        notes: what ranks report of their models.
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
        """Return a report of what the recovery did, given the ranks that are dead now and the run
        whose ranks were stopped at different points.
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
            steps=describe_steps(find_step_differences(self.steps)),
            is_apart=self.note_to >= 0 and self.note_to == apart,
        )


class Deferred:
    """The runs that were submitted during a recovery and wait for its end, in order.

    Args:
        mesh: has the runs.

    Attributes:
        runs: the runs by their numbers, each as it will be sent.
    """

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self.runs: dict[int, Parcel[Relay]] = {}

    def add(self, run: int, parcel: Parcel[Any]) -> None:
        """Hold a run back until the recovery has ended."""
        pending = self._mesh.pending[run]
        pending.is_sent = False
        self._mesh.note(run, pending, pending.phase, "deferred", pending.started_at)
        self.runs[run] = parcel

    def take_back(self, run: int) -> bool:
        """Drop a run that was held back; return whether it was."""
        return self.runs.pop(run, None) is not None

    def send_all(self, now: float, settle: Settle) -> list[Effect]:
        """Return the messages that send all waiting runs to those of their ranks that live.

        Args:
            now: seconds.
            settle: tells a run of those that do not.
        """
        waiting, self.runs = self.runs, {}
        effects: list[Effect] = []
        for run, (relay, frames) in waiting.items():
            pending = self._mesh.pending.get(run)
            if pending is not None:
                pending.begin(now)
                self._mesh.note(run, pending, "waiting", "sent", now)
                dead = self._mesh.dead
                ranks = tuple(
                    rank for rank in relay.ranks if rank in pending.ranks and rank not in dead
                )
                if pending.fills:
                    effects += self._mesh.news.tell(run, pending.members)
                if ranks:
                    effects.append(
                        Send(Parcel(msgspec.structs.replace(relay, ranks=ranks), frames))
                    )
                for rank in sorted(pending.ranks & dead.keys()):
                    effects += settle(run, (rank,), Parcel(dead[rank]), now)
        return effects


class Replacements:
    """The ranks to replace: dead ones, and living ones that the user's ``heal`` names, which are
    replaced only for that request.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._ranks: set[int] = set()
        self._asked: set[int] = set()

    def missing(self) -> tuple[int, ...]:
        """Return the ranks to replace that are dead; runs for them wait."""
        return tuple(sorted(self._ranks & self._mesh.dead.keys()))

    def add(self, ranks: Collection[int]) -> None:
        """Note ranks to replace at the next recovery, also without a request of the user."""
        self._ranks.update(ranks)
        self._asked.difference_update(ranks)

    def ask_for(self, ranks: Collection[int]) -> None:
        """Note ranks to replace because the user's ``heal`` names them."""
        self._asked |= set(ranks) - self._ranks
        self._ranks |= self._asked

    def withdraw(self) -> None:
        """Drop the ranks that only a user's ``heal`` named: it was withdrawn or failed."""
        self._ranks -= self._asked
        self._asked.clear()

    def spare(self, ranks: Collection[int]) -> None:
        """Drop these ranks from those to replace: they are new, or cannot be replaced."""
        self._ranks.difference_update(ranks)
        self._asked.difference_update(ranks)

    def clear(self) -> None:
        """Drop all ranks to replace."""
        self._ranks.clear()
        self._asked.clear()


class HealRequests:
    """The user's requests for a heal that wait for a `HealReport`.

    Args:
        mesh: the mesh.

    Attributes:
        waiting: their numbers.
    """

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self.waiting: list[int] = []
        self._patience_ends = 0.0

    def busy(self) -> set[int]:
        """Return the living ranks that run the user's work."""
        return self._mesh.living() & self._mesh.busy(with_heals=False)

    def add(self, request: int, now: float) -> None:
        """Note a request of the user for a heal, and how long the heal may wait for ranks."""
        due = [run.settle_at for run in self._mesh.pending.values() if run.settle_at is not None]
        self._patience_ends = max([now, *due]) + PATIENCE_S
        self.waiting.append(request)

    def can_wait_for(self, ranks: set[int], now: float) -> bool:
        """Return whether these ranks are about to leave the run that they are in, because it has
        failed on a rank.
        """
        held, pending = self._mesh.held, self._mesh.pending
        left = {
            rank for rank in ranks if held.get(rank) in pending
        }  # their run, but others have not
        return bool(ranks) and now < self._patience_ends and self._mesh.in_failed_runs(ranks - left)

    def can_ask_again(self, silent: set[int], now: float) -> bool:
        """Return whether to probe again ranks that have not answered: a busy machine may delay
        their answers.
        """
        return bool(self.waiting and silent) and now < self._patience_ends

    def stop_asking_again(self) -> None:
        """Do not probe silent ranks again, as no request for a heal waits for their answers."""
        self._patience_ends = 0.0

    def deadline(self) -> float | None:
        """Return when to refuse the waiting requests, unless ranks become idle before."""
        return self._patience_ends if self.waiting else None

    def refuse(self) -> list[Effect]:
        """Answer all waiting requests with a failure: ranks are still busy."""
        return self.answer(HealReport(failure=tell_busy(self._mesh.running(self.busy()))))

    def answer_without(self, missing: set[int], report: HealReport, now: float) -> list[Effect]:
        """Answer all waiting requests, unless ranks that took no part in the heal are about to
        become free.
        """
        if self.can_wait_for(missing, now):
            return []
        if missing and not report.failure:  # only who asked for it needs to know
            report = dataclasses.replace(report, failure=tell_busy(self._mesh.running(missing)))
        return self.answer(report)

    def answer(self, report: HealReport) -> list[Effect]:
        """Answer all waiting requests for a heal with a report."""
        requests, self.waiting = self.waiting, []
        return [Answer(request, report) for request in requests]
