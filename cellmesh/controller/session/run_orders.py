"""Orders of users and waiting threads about runs in flight: wait for them, answer their questions,
interrupt them, give them up.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...errors import NoMeshError
from ..core.core import Core, Effect
from ..run import Run
from .link import Command, Link

_ANSWER_S = 5.0


class RunOrders:
    """Waits for, interrupts and answers the runs of one session; runs call it as their
    `RunControl`; usable on any thread.

    Args:
        link: carries the orders out.
        num_ranks: of the mesh.
        beside: gives the runs on some ranks that a run of the user's may wait for: queries.
    """

    def __init__(
        self, link: Link, num_ranks: int, beside: Callable[[Sequence[int]], Iterable[int]]
    ) -> None:
        self._link = link
        self.num_ranks = num_ranks
        self._beside = beside
        self.check_may_wait = link.check_may_wait

    def post_if_open(self, command: Command) -> None:
        """Have the core execute a command, unless the link is closed."""
        with contextlib.suppress(NoMeshError):
            self._link.post(command)

    def wait_for(self, number: int) -> None:
        """Note that the caller waits for a run on some ranks, and submits nothing else."""
        self.post_if_open(lambda core, now: core.wait_for(number))

    def begin_wait(self, number: int, ranks: Sequence[int]) -> None:
        """Note that the user waits for a run's end on these ranks, and submits nothing else."""
        if len(ranks) < self.num_ranks:  # else there is none that would have to join it
            self.wait_for(number)

    def interrupt(self, runs: Sequence[Run[Any]]) -> None:
        """Interrupt runs in flight, given with the oldest first; does not wait for their ends."""
        for run in runs:
            run.note_interrupted()
        numbers = [run.number for run in reversed(runs)]
        self.post_if_open(lambda core, now: core.interrupt_all(numbers, now))

    def interrupt_run(self, number: int, ranks: Sequence[int]) -> None:
        """Interrupt a run, and older callbacks and queries on its ranks, for which it may wait."""
        for each in (number, *(older for older in self._beside(ranks) if older < number)):
            self.give_up(each)

    def give_up(self, number: int) -> None:
        """Interrupt one run and no other: its user has stopped waiting for it."""
        self.post_if_open(functools.partial(_interrupt, number))

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> None:
        """Send the user's input to ranks that asked for it (rank -> request)."""
        self.post_if_open(lambda core, now: core.reply(requests, text, is_end))

    def condemned(self) -> set[int]:
        """Return the ranks that will be killed unless they end their interrupted run before, once
        earlier orders have been executed.
        """
        found: Future[set[int]] = Future()

        def look(core: Core, now: float) -> Sequence[Effect]:
            found.set_result(core.condemned)
            return ()

        try:
            self._link.post(look)
            return found.result(_ANSWER_S)
        except (NoMeshError, TimeoutError):
            return set()


def _interrupt(run: int, core: Core, now: float) -> Sequence[Effect]:
    return core.interrupt(run)
