"""Pauses the ranks of runs that are being stopped, and interrupts them once all have reached the
same point of their program, as `stopping` decides. Pure, as `core.Core`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ...wire.messages import Interrupt
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.stopping import Owed, Pause, StopState
from .effects import Effect, Note
from .mesh_state import MeshState, Pending
from .requests import control
from .stopping import LIMIT_S, Stopping, Verdict

# Messages that stop one or more runs, by the ranks that receive them.
Told: TypeAlias = dict[tuple[int, ...], list[Interrupt | Pause]]


def describe_apart(ranks: Sequence[int], is_aligned: bool) -> str:
    """Return a note on ranks that were interrupted at another point of the program than the others.

    Args:
        ranks: the ranks.
        is_aligned: whether they ran Python code; else they missed the time limit.
    """
    were = "was" if len(ranks) == 1 else "were"
    why = "ran Python" if is_aligned else f"did not get to the same operation within {LIMIT_S:g} s"
    return (
        f"{describe_ranks(ranks)} {why} and {were} interrupted at another point of the program: "
        "%dist_check shows whether replicas still agree"
    )


class Alignment:
    """Brings the ranks of runs that are being stopped to a common point of their program.

    Args:
        mesh: the mesh; holds its runs.
        on: handler of run events, called with ``all ranks stand``, a run's number, the run, the
            time and the verdict, once the run's ranks are to be interrupted.

    Attributes:
        stopping: the ranks that are being stopped, and where each is; None if there are none.
    """

    def __init__(self, mesh: MeshState, on: Callable[..., list[Effect]]) -> None:
        self._mesh = mesh
        self._on = on
        self.stopping: Stopping | None = None

    def is_out_of_reach(self, run: int, pending: Pending) -> bool:
        """Return whether the ranks of a run that was sent cannot be brought to a common point: no
        main thread executes the run, or one of its ranks waits for the user's input, which may take
        forever.
        """
        if not pending.is_sent or pending.phase != "running":
            return False
        is_asking = pending.ranks & self._mesh.asking.keys()
        return not pending.is_work or bool(is_asking) or not self._mesh.runs_first(run)

    def begin(self, run: int, now: float, told: Told) -> set[int]:
        """Ask the ranks that execute a run to pause; return these ranks.

        The other ranks of the run will not begin it.
        """
        first = self._mesh.runs_first(run)
        if self.stopping is None:
            self.stopping = Stopping(self._mesh.num_ranks, now)
        self.stopping.add(run, first, self._mesh.pending[run].started_at)
        told.setdefault(tuple(sorted(first)), []).append(Pause(run))
        return first

    def report(self, ranks: Sequence[int], state: StopState, now: float) -> list[Effect]:
        """Handle reports in which ranks state where they are in a run that is being stopped."""
        pending = self._mesh.pending.get(state.run)
        if self.stopping is None or pending is None:
            return []
        owing = self.stopping.report(ranks, state, now)
        return [*self.send_on(owing), *self.end_if_aligned(now)]

    def send_on(self, owing: Mapping[int, Owed]) -> list[Effect]:
        """Let each of these paused ranks go on until it has executed the operations that other
        ranks have begun and it has not.
        """
        assert self.stopping is not None
        alike = group_ranks({rank: (self.stopping.run_of(rank), owing[rank]) for rank in owing})
        return [control(ranks, Pause(run, owed)) for (run, owed), ranks in alike.items()]

    def end_if_aligned(self, now: float) -> list[Effect]:
        """Interrupt the runs that are being stopped, once all of their ranks have paused or the
        time limit has passed.
        """
        if self.stopping is None or (verdict := self.stopping.decide(now)) is None:
            return []
        effects: list[Effect] = []
        for run in self.stopping.runs:
            if (pending := self._mesh.pending.get(run)) is not None:
                effects += self._on("all ranks stand", run, pending, now, verdict)
        self.stopping = None
        return effects

    def strike(self, run: int, pending: Pending, verdict: Verdict) -> list[Effect]:
        """Interrupt a run on the ranks that have been asked to pause in it.

        A note follows if some of them are not at the point where the others are.
        """
        ranks = () if self.stopping is None else self.stopping.runs.get(run, ())
        ranks = tuple(rank for rank in ranks if rank in pending.ranks - pending.failing)
        effects: list[Effect] = []
        if apart := sorted(set(verdict.apart).intersection(ranks)):
            self._mesh.apart = run
            effects.append(Note(run, describe_apart(apart, verdict.is_aligned)))
        return [*effects, control(ranks, Interrupt(run, verdict.is_aligned))] if ranks else effects

    def run_ended(self, now: float) -> list[Effect]:
        """Handle the end of a run on all its ranks."""
        if self.stopping is None:
            return []
        self.stopping = None if self.stopping.is_over else self.stopping
        return self.end_if_aligned(now)

    def tick(self, now: float) -> list[Effect]:
        """Interrupt the runs that are being stopped if all of their ranks have paused or the time
        limit has passed; otherwise ask ranks that have not paused where they are.
        """
        if self.stopping is None:
            return []
        effects = self.end_if_aligned(now)
        if self.stopping is not None and now >= self.stopping.look_at:
            asked = self.stopping.to_look_at(now)
            effects += [control(ranks, Pause(run)) for run, ranks in asked.items()]
        return effects
