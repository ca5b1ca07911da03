"""Where the inspector has its answers from: the ranks of a mesh, or whatever stands in for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from ....controller.inspect.inspection import Inspection, Spread, comparison_of, inspect, spread_of
from ....controller.inspect.pinned import about
from ....controller.inspect.query import ANSWER_S, Looked, look
from ....controller.inspect.replica_diff import Comparison
from ....controller.options import ranks_at
from ....controller.rank_set import RankSet
from ....errors import CellmeshError
from ....wire.inspect import OfValue, Refusal


class Answers(Protocol):
    """Answers what the inspector asks; called on any thread, and may block."""

    @property
    def expression(self) -> str:
        """What is looked at."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who is asked."""

    def look(
        self, subject: OfValue, ranks: Sequence[int] | None = None, is_beside: bool = False
    ) -> Looked:
        """Have ranks look at something (see `looking.look`); all of them if none are named."""

    def inspect(self, is_beside: bool) -> Inspection:
        """What there is on all of them (see `inspecting.inspect`)."""

    def compare(self, inspection: Inspection, path: str, is_beside: bool) -> Comparison:
        """Whether one tensor's replicas are equal, and by how much not."""

    def spread(self, inspection: Inspection, path: str, is_beside: bool) -> Spread | None:
        """One tensor's histograms."""

    def is_busy(self) -> bool:
        """Whether any of them runs something."""

    def close(self) -> None:
        """What is shown changes no more: nothing need be kept for it. Does not wait."""


class MeshAnswers:
    """The answers of a mesh's ranks; those that do not come within `ANSWER_S` count as refusals.

    Args:
        ranks: who is asked.
        expression: what is looked at.
        inspection: what they have told of it already; later questions are about the value that it
            is of.
    """

    def __init__(
        self, ranks: RankSet, expression: str, inspection: Inspection | None = None
    ) -> None:
        self._ranks = ranks
        self._hold = inspection.hold if inspection is not None else None
        self._is_closed = False
        self.expression = expression
        self.ranks = ranks.ranks

    def look(
        self, subject: OfValue, ranks: Sequence[int] | None = None, is_beside: bool = False
    ) -> Looked:
        """See `Answers`; a mesh that has ended refuses."""
        asked = self.ranks if ranks is None else tuple(ranks)
        part = self._ranks.part(asked)
        try:
            return look(part, about(subject, self._hold), is_beside=is_beside, timeout_s=ANSWER_S)
        except CellmeshError as error:
            return Looked({}, dict.fromkeys(asked, _refusal(error)))

    def inspect(self, is_beside: bool) -> Inspection:
        """See `Answers`; a mesh that has ended refuses."""
        try:
            found = inspect(self._ranks, self.expression, is_beside=is_beside, timeout_s=ANSWER_S)
        except CellmeshError as error:
            return Inspection(self.expression, {}, dict.fromkeys(self.ranks, _refusal(error)))
        if found.found:
            former, self._hold = self._hold, found.hold
            if former is not None:
                former.let_go()
            if self._is_closed and self._hold is not None:  # meanwhile
                self._hold.let_go()
        return found

    def compare(self, inspection: Inspection, path: str, is_beside: bool) -> Comparison:
        """See `Answers`."""
        held = dataclasses.replace(inspection, hold=self._hold)
        try:
            return comparison_of(self._ranks, held, path, is_beside=is_beside, timeout_s=ANSWER_S)
        except CellmeshError:
            return Comparison((), self.ranks)

    def spread(self, inspection: Inspection, path: str, is_beside: bool) -> Spread | None:
        """See `Answers`."""
        held = dataclasses.replace(inspection, hold=self._hold)
        try:
            return spread_of(self._ranks, held, path, is_beside=is_beside, timeout_s=ANSWER_S)
        except CellmeshError:
            return None

    def is_busy(self) -> bool:
        """See `Answers`."""
        return bool(self._ranks.session.catalog.busy_ranks() & set(self.ranks))

    def close(self) -> None:
        """See `Answers`."""
        self._is_closed = True
        if self._hold is not None:
            self._hold.let_go()


def _refusal(error: Exception) -> Refusal:
    return Refusal(type(error).__name__, str(error))


def coordinates_of(dims: Mapping[str, int], ranks: Sequence[int]) -> dict[int, str]:
    """rank -> its coordinate in the mesh, as ``--at`` takes it; none in a mesh of one dim."""
    if len(dims) < 2:
        return {}
    named = {rank: [] for rank in ranks}  # type: dict[int, list[str]]
    for name, size in dims.items():
        for index in range(size):
            for rank in ranks_at(dims, {name: index}):
                if rank in named:
                    named[rank].append(f"{name}={index}")
    return {rank: ",".join(parts) for rank, parts in named.items()}
