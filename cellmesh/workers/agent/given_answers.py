"""Finds ranks whose results fill the agent's memory, so that it stops reading from them; pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from ...wire.limits import may_wait_for
from ...wire.status import RankState


class GivenAnswers:
    """Counts the bytes of results in runs that some of their ranks have not ended yet.

    Args:
        limit_bytes: how much a rank may give before it is not read.

    Attributes:
        ahead: the ranks that are not read: those beyond the limit, but for those that another rank
            may wait for. The rank that is furthest behind is never among them.
        waits: the states of ranks that waited for others when they were last asked.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes: collections.Counter[int] = collections.Counter()
        self.waits: dict[int, RankState] = {}
        self.ahead: set[int] = set()

    def count(self, ranks: Iterable[int], num_bytes: int) -> None:
        """Add bytes of results to ranks; a negative number once all ranks have ended the run."""
        for rank in ranks:
            self._num_bytes[rank] += num_bytes
            if self._num_bytes[rank] <= self._limit_bytes:
                self.ahead.discard(rank)
            elif not self._is_awaited(rank):
                self.ahead.add(rank)

    def note_state(self, ranks: Iterable[int], state: RankState) -> None:
        """Note whether ranks wait in a collective."""
        for rank in ranks:
            if state.collective:
                self.waits[rank] = state
            else:
                self.waits.pop(rank, None)
        self._find_ahead()

    def note_going_on(self, ranks: Iterable[int]) -> None:
        """Note that ranks have ended a run, and so no longer wait in a collective."""
        if waiting := self.waits.keys() & set(ranks):
            for rank in waiting:
                del self.waits[rank]
            self._find_ahead()

    def _is_awaited(self, rank: int) -> bool:
        """Whether another rank may wait in a collective for this rank's next run."""
        return any(
            may_wait_for(state, (rank,)) for other, state in self.waits.items() if other != rank
        )

    def _find_ahead(self) -> None:
        self.ahead = {
            rank
            for rank, num_bytes in self._num_bytes.items()
            if num_bytes > self._limit_bytes and not self._is_awaited(rank)
        }
