"""Inspects a value on some ranks: asks them for summaries, compares replicas, counts elements."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import CellmeshError
from ...wire.inspect import (
    Digests,
    Histogram,
    OfValue,
    Overview,
    Refusal,
    Sample,
    TensorSummary,
)
from ...wire.ranks import describe_ranks
from .query import (
    ANSWER_S,
    Inspection,
    PinnedValue,
    QueryResult,
    Spread,
    about,
    forget_what_is_gone,
    look,
)
from .replica_diff import (
    Comparison,
    LargestDifference,
    Parts,
    Replicas,
    compare,
    differing,
    largest_difference,
    size_of,
    split,
)

if TYPE_CHECKING:
    from ..rank_set import RankSet

_NUM_BINS = 48
# Of a nest: more tensors than this are not listed.
_MAX_ITEMS = 20_000
# Of how many of a value's tensors histograms are made, and differences measured, at once.
_MAX_SPREADS = 12
_MAX_MEASURED = 12
# Elements that are brought here to be compared, of all ranks together.
_MAX_COMPARED = 1 << 18
_NUM_PARTS = 256
_NUM_ROUNDS = 4


def inspect(
    ranks: RankSet,
    expression: str,
    *,
    is_beside: bool = False,
    num_bins: int = _NUM_BINS,
    timeout_s: float | None = None,
) -> Inspection:
    """Inspect a value on some ranks; blocks until all have answered (see `look`).

    A path of names, attributes and constant indices is followed, and nothing runs; ranks that are
    busy answer from their control threads. Any other expression is evaluated once on each rank, if
    none is busy; ranks keep its value as long as the inspection lives (see `PinnedValue`).

    Args:
        ranks: the ranks.
        expression: a name, or any Python expression.
        is_beside: never wait for a rank's turn, also where it seems idle, and run no code.
        num_bins: of the histograms.
        timeout_s: how long to wait in all; None as long as it takes for ranks that are idle.

    Raises:
        NoMeshError: the mesh has ended.
    """
    began_at = time.monotonic()
    context = _Context(ranks, expression, is_beside, _deadline(timeout_s))
    overview, pinned = _overview(context)
    context = dataclasses.replace(context, pinned=pinned)
    found = dict(sorted(overview.answers.items()))
    inspection = Inspection(expression, found, dict(sorted(overview.refusals.items())))
    summaries = inspection.by_path()
    comparisons = {path: compare(of_ranks) for path, of_ranks in summaries.items()}
    unequal = [path for path, comparison in comparisons.items() if comparison.unequal]
    for path in unequal[:_MAX_MEASURED]:
        comparisons[path] = _measured(context, path, comparisons[path], summaries[path])
    tensors = [path for path, of_ranks in summaries.items() if _scale_of(of_ranks)]
    spreads = {
        path: _spread(context, path, summaries[path], num_bins) for path in tensors[:_MAX_SPREADS]
    }
    return dataclasses.replace(
        inspection,
        comparisons=comparisons,
        spreads={path: spread for path, spread in spreads.items() if spread is not None},
        ranks=ranks,
        pinned=pinned,
        took_s=time.monotonic() - began_at,
    )


class InspectionSource:
    """Answers the questions of one inspector about one expression, by asking ranks.

    Its methods block, and are called on any thread. A rank that does not answer within `ANSWER_S`
    counts as refusing, and so do all ranks once the mesh has ended.

    Args:
        ranks: the ranks.
        expression: what is inspected.
        inspection: an inspection of the expression; questions are about the value that it found.
    """

    def __init__(
        self, ranks: RankSet, expression: str, inspection: Inspection | None = None
    ) -> None:
        self._ranks = ranks
        self._pinned = inspection.pinned if inspection is not None else None
        self._is_closed = False
        self.expression = expression
        self.ranks = ranks.ranks

    def look(
        self, subject: OfValue, ranks: Sequence[int] | None = None, is_beside: bool = False
    ) -> QueryResult:
        """Ask some ranks, or all, a query about the inspected value."""
        asked = self.ranks if ranks is None else tuple(ranks)
        try:
            return self._context(is_beside).look(asked, subject)
        except CellmeshError as error:
            return QueryResult({}, dict.fromkeys(asked, _refusal(error)))

    def inspect(self, is_beside: bool) -> Inspection:
        """Inspect the expression on all ranks; later questions are about the value found."""
        try:
            found = inspect(self._ranks, self.expression, is_beside=is_beside, timeout_s=ANSWER_S)
        except CellmeshError as error:
            return Inspection(self.expression, {}, dict.fromkeys(self.ranks, _refusal(error)))
        if found.found:
            former, self._pinned = self._pinned, found.pinned
            if former is not None:
                former.let_go()
            if self._is_closed and self._pinned is not None:  # closed while the ranks answered
                self._pinned.let_go()
        return found

    def compare(
        self, path: str, summaries: Mapping[int, TensorSummary], is_beside: bool = False
    ) -> Comparison:
        """Compare one tensor's replicas, and measure by how much they differ."""
        try:
            return _measured(self._context(is_beside), path, compare(summaries), summaries)
        except CellmeshError:
            return Comparison((), self.ranks)

    def spread(
        self,
        path: str,
        summaries: Mapping[int, TensorSummary],
        is_beside: bool = False,
        num_bins: int = _NUM_BINS,
    ) -> Spread | None:
        """Make one tensor's histograms on all ranks, on one scale; None without finite elements."""
        try:
            return _spread(self._context(is_beside), path, summaries, num_bins)
        except CellmeshError:
            return None

    def is_busy(self) -> bool:
        """Return whether any of the ranks executes a run."""
        return bool(self._ranks.session.runs.busy_ranks() & set(self.ranks))

    def close(self) -> None:
        """Have the ranks drop the inspected value; does not wait."""
        self._is_closed = True
        if self._pinned is not None:
            self._pinned.let_go()

    def _context(self, is_beside: bool) -> _Context:
        return _Context(self._ranks, self.expression, is_beside, _deadline(ANSWER_S), self._pinned)


@dataclass(frozen=True)
class _Context:
    """Which ranks are asked about which value, and until when answers are waited for."""

    ranks: RankSet
    expression: str
    is_beside: bool
    deadline: float | None
    pinned: PinnedValue | None = None

    def look(self, ranks: Sequence[int], subject: OfValue, takes_turn: bool = False) -> QueryResult:
        left_s = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        return look(
            self.ranks.part(ranks),
            about(subject, self.pinned),
            is_beside=self.is_beside,
            takes_turn=takes_turn,
            timeout_s=left_s,
        )


def _overview(context: _Context) -> tuple[QueryResult, PinnedValue | None]:
    """Ask ranks for a summary of the expression's value; a path of names is looked up, any other
    expression runs on all ranks or none, as it may contain a collective.
    """
    expression, session = context.expression, context.ranks.session
    forget_what_is_gone(session)
    result = context.look(context.ranks.ranks, Overview(expression, _MAX_ITEMS))
    wanted = [rank for rank, refusal in result.refusals.items() if refusal.needs_code]
    if not wanted or context.is_beside:
        return result, None
    busy = session.runs.busy_ranks() & set(context.ranks.ranks)
    if busy:
        why = f"{describe_ranks(busy)} {'is' if len(busy) == 1 else 'are'} busy"
        text = f"{expression!r} has to run code, on all ranks or on none, and {why}"
        result.refusals.update(dict.fromkeys(set(wanted) - busy, Refusal("CellmeshError", text)))
        return result, None
    pinned = PinnedValue(session, wanted)
    again = dataclasses.replace(context, pinned=pinned).look(
        wanted, Overview(expression, _MAX_ITEMS, runs=True), takes_turn=True
    )
    refusals = {rank: why for rank, why in result.refusals.items() if rank not in wanted}
    answers = {**result.answers, **again.answers}
    return QueryResult(answers, {**refusals, **again.refusals}), pinned


def _spread(
    context: _Context, path: str, summaries: Mapping[int, TensorSummary], num_bins: int
) -> Spread | None:
    scale = _scale_of(summaries)
    if scale is None:
        return None
    ranks = [rank for rank, summary in summaries.items() if summary.min is not None]
    result = context.look(ranks, Histogram(context.expression, path, *scale, num_bins))
    return Spread(*scale, dict(sorted(result.answers.items())))


def _measured(
    context: _Context, path: str, comparison: Comparison, summaries: Mapping[int, TensorSummary]
) -> Comparison:
    replicas = tuple(
        each
        if each.is_equal
        else dataclasses.replace(each, difference=_difference(context, path, each, summaries))
        for each in comparison.replicas
    )
    return dataclasses.replace(comparison, replicas=replicas)


def _difference(
    context: _Context, path: str, replicas: Replicas, summaries: Mapping[int, TensorSummary]
) -> LargestDifference | None:
    """Measure by how much replicas differ, from a bounded part of them."""
    one_of_each = [ranks[0] for ranks in replicas.alike]
    shapes = {summaries[rank].local_shape for rank in one_of_each}
    if len(shapes) > 1 or None in shapes:
        return None
    most = max(_MAX_COMPARED // len(one_of_each), 1)
    parts: Parts = split(((0, summaries[one_of_each[0]].num_elements),), _NUM_PARTS)
    for _ in range(_NUM_ROUNDS):  # narrow down to where they differ
        if size_of(parts) <= most:
            break
        result = context.look(one_of_each, Digests(context.expression, path, parts))
        if result.refusals:
            return None
        parts = differing(parts, list(result.answers.values()))
        if len(parts) > _NUM_PARTS // 4:
            break
        parts = split(parts, _NUM_PARTS)
    result = context.look(one_of_each, Sample(context.expression, path, parts, most))
    if result.refusals:
        return None
    samples = [result.answers[rank] for rank in one_of_each]
    if len({sample.shape for sample in samples}) > 1:  # the value has changed since
        return None
    return LargestDifference(largest_difference(samples), size_of(parts) > most)


def _scale_of(summaries: Mapping[int, TensorSummary]) -> tuple[float, float] | None:
    if all(summary.shape == () for summary in summaries.values()):  # a number has no histogram
        return None
    lows = [summary.min for summary in summaries.values() if summary.min is not None]
    highs = [summary.max for summary in summaries.values() if summary.max is not None]
    return (min(lows), max(highs)) if lows else None


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _refusal(error: Exception) -> Refusal:
    return Refusal(type(error).__name__, str(error))
