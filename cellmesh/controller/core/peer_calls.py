"""Calls of ranks of this or another mesh that ranks execute, as runs that this controller has not
sent. Pure, as `core.Core`.

Ranks report such calls only if they last, each for itself (`wire.status.PeerWork`). So a rank may
report one after another rank has failed in it, or died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...wire.codec import Parcel
from ...wire.peer_calls import PEER_RUNS, PeerWork
from .effects import Deliver, Effect
from .mesh_state import MeshState, Pending


class PeerCalls:
    """The calls of other ranks that ranks of one mesh execute.

    Args:
        mesh: state of the mesh and of its runs.
        add: registers a run.
        on: handler of run events, called with ``a rank failed``, a run's number, the run and the
            time, once ranks have failed in a call that others execute.
        interrupt: interrupts runs (`Runs.interrupt`).
    """

    def __init__(
        self,
        mesh: MeshState,
        add: Callable[[int, Pending], list[Effect]],
        on: Callable[..., list[Effect]],
        interrupt: Callable[[Collection[int], float], list[Effect]],
    ) -> None:
        self._mesh, self._add, self._on, self._interrupt = mesh, add, on, interrupt

    def begin(self, call: PeerWork, ranks: Collection[int], now: float) -> list[Effect]:
        """Register a call that ranks report, or report again, as a run of theirs."""
        run, effects = call.run, list[Effect]()
        pending = self._mesh.pending.get(run)
        if pending is None:
            since = now - call.age_s
            pending = Pending(call.ranks, set(), since, since, since, title=call.title)
            effects += self._add(run, pending)
        living = self._mesh.among_living(ranks)
        if new := tuple(rank for rank in living if rank not in pending.ranks):
            pending.ranks.update(new)
            effects.append(Deliver(run, new, Parcel(call)))
            if run in self._mesh.failed_calls or self._mesh.dead.keys() & set(call.ranks):
                effects += self._fail(run, pending, now)
        if call.is_cancelled and pending.interrupted_at is None:
            effects += self._interrupt([run], now)
        return effects

    def fail(self, run: int, now: float) -> list[Effect]:
        """Record that a call has failed on a rank: others that execute it get a time limit."""
        self._mesh.failed_calls.append(run)
        pending = self._mesh.pending.get(run)
        return [] if pending is None else self._fail(run, pending, now)

    def ranks_died(self, ranks: Collection[int], now: float) -> list[Effect]:
        """Handle the deaths of ranks, which may not have reported a call that others execute."""
        effects: list[Effect] = []
        for run, pending in [*self._mesh.pending.items()]:
            if run in PEER_RUNS and not set(pending.members).isdisjoint(ranks):
                effects += self._fail(run, pending, now)
        return effects

    def _fail(self, run: int, pending: Pending, now: float) -> list[Effect]:
        pending.has_failed = True
        return self._on("a rank failed", run, pending, now) if pending.settle_at is None else []
