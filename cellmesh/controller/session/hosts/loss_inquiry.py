"""Asks the engine that has started a mesh's agents why one of them has gone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from ....wire.ticket import Ticket
from ..launch.slurm import why_lost

# How often an answer is looked for.
ASK_S = 0.05


def asker_of(ticket: Ticket) -> Callable[[str], str] | None:
    """Return what asks why the agent on a node has gone; None if nothing knows."""
    return functools.partial(why_lost, ticket.slurm_job) if ticket.slurm_job else None


class LossInquiry:
    """Asks on threads of its own, as an engine may take seconds to answer.

    Args:
        ask: returns why the agent on a node has gone, or ""; None if nothing can be asked.
    """

    def __init__(self, ask: Callable[[str], str] | None) -> None:
        self._ask = ask
        self._asked: dict[int, tuple[Future[str], str]] = {}

    def begin(self, index: int, node: str, reason: str = "") -> bool:
        """Ask why a host's agent has gone; False if nothing can be asked.

        Args:
            reason: what else is known; "" if the agent may be alive.
        """
        if self._ask is None:
            return False
        if index in self._asked:
            future, before = self._asked[index]
            self._asked[index] = future, reason or before
            return True
        future = Future()
        self._asked[index] = future, reason
        threading.Thread(
            target=_answer, args=(self._ask, node, future), name="cellmesh-inquiry", daemon=True
        ).start()
        return True

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._asked)

    def answers(self) -> Iterator[tuple[int, str]]:
        """Yield the hosts that were asked about and why they have gone; "" if nothing says so."""
        for index, (future, reason) in list(self._asked.items()):
            if future.done():
                del self._asked[index]
                yield index, future.result() or reason


def _answer(ask: Callable[[str], str], node: str, future: Future[str]) -> None:
    why = ""
    try:
        why = ask(node)
    finally:  # what the agent has said waits for it
        future.set_result(why)
