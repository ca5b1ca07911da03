"""Inspect a value on some ranks: what each has, whether replicas are equal, how their elements are
spread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...wire.inspect import (
    Digests,
    Histogram,
    OfValue,
    Overview,
    Refusal,
    Sample,
    TensorSummary,
    ValueSummary,
)
from ...wire.ranks import describe_groups, describe_ranks
from .pinned import Hold, about, forget_what_is_gone
from .query import Looked, look
from .replica_diff import (
    Comparison,
    Difference,
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
# Of a nest: more tensors than this are not told of.
_MAX_ITEMS = 20_000
# Of how many of a value's tensors histograms are made, and differences measured, at once.
_MAX_SPREADS = 12
_MAX_MEASURED = 12
# Elements that are brought here to be compared, of all ranks together.
_MAX_COMPARED = 1 << 18
_NUM_PARTS = 256
_NUM_ROUNDS = 4


@dataclass(frozen=True)
class Spread:
    """How one tensor's elements are spread, on all ranks on one scale.

    Attributes:
        low, high: the scale, cut into equal bins.
        counts: rank -> elements in each bin.
    """

    low: float
    high: float
    counts: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Mapping[int, TensorSummary]):
    """A value as some ranks have it; a Mapping rank -> `TensorSummary` of those that have it.

    Of a value with several tensors in it, these facts are of the whole, and those of its tensors
    are in `facts_of`.

    Attributes:
        expression: what was inspected.
        found: rank -> what it has.
        refusals: rank -> why it has nothing: the expression raised there, or the rank is dead.
        comparisons: path -> whether replicas are equal.
        spreads: path -> histograms, of the first tensors.
        ranks: who was asked, and can be asked for more; None if nobody can.
        hold: keeps the value on its ranks, if code was run for it; None if it is found anew each
            time.
        took_s: how long that took.
    """

    expression: str
    found: Mapping[int, ValueSummary]
    refusals: Mapping[int, Refusal] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    ranks: RankSet | None = None
    hold: Hold | None = None
    took_s: float = 0.0

    @property
    def paths(self) -> tuple[str, ...]:
        """Where its tensors are, on whichever rank: "" is the value itself."""
        return tuple(self.by_path())

    @property
    def is_one(self) -> bool:
        """Whether it is one tensor, or one plain value, on each rank, and no nest of them."""
        return all([item.path for item in found.items] == [""] for found in self.found.values())

    @property
    def torn(self) -> tuple[int, ...]:
        """Ranks that were looked at while they ran: values may be torn."""
        return tuple(rank for rank, found in self.found.items() if found.is_torn)

    def facts_of(self, path: str) -> dict[int, TensorSummary]:
        """rank -> what it has at a path."""
        return self.by_path().get(path, {})

    def by_path(self) -> dict[str, dict[int, TensorSummary]]:
        """path -> rank -> what it has there, in the order of the first rank that has it."""
        facts: dict[str, dict[int, TensorSummary]] = {}
        for rank, found in sorted(self.found.items()):
            for item in found.items:
                facts.setdefault(item.path, {})[rank] = item
        return facts

    def __getitem__(self, rank: int) -> TensorSummary:
        try:
            found = self.found[rank]
        except KeyError:
            why = self.refusals.get(rank)
            raise KeyError(
                f"rank {rank} {'was not asked' if why is None else f'has none: {why}'}"
            ) from None
        if len(found.items) == 1 and not found.items[0].path:
            return found.items[0]
        return TensorSummary(kind=found.kind, text=found.text)

    def __iter__(self) -> Iterator[int]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __repr__(self) -> str:
        words = {rank: f"{fact.kind} {_in_words(fact)}" for rank, fact in self.items()}
        parts = [f"on {group}" for group in describe_groups(words)]
        if self.found and "" in self.comparisons:
            parts.append(str(self.comparisons[""]))
        parts += [f"rank {rank}: {refusal}" for rank, refusal in self.refusals.items()]
        return f"<{self.expression} {'; '.join(parts)}>"


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
    none is busy; ranks keep its value as long as the inspection lives (see `Hold`).

    Args:
        ranks: who is asked.
        expression: a name, or any Python expression.
        is_beside: never wait for a rank's turn, also where it seems idle, and run no code.
        num_bins: of the histograms.
        timeout_s: how long to wait in all; None as long as it takes for ranks that are idle.

    Raises:
        NoMeshError: the mesh has ended.
    """
    began_at = time.monotonic()
    inspection = _Inspector(ranks, expression, is_beside, timeout_s=timeout_s).inspect(num_bins)
    return dataclasses.replace(inspection, took_s=time.monotonic() - began_at)


def comparison_of(
    ranks: RankSet,
    inspection: Inspection,
    path: str,
    *,
    is_beside: bool = False,
    timeout_s: float | None = None,
) -> Comparison:
    """Whether one tensor's replicas are equal, and by how much not. Blocks."""
    facts = inspection.facts_of(path)
    inspector = _Inspector(ranks, inspection.expression, is_beside, inspection.hold, timeout_s)
    return inspector.measured(path, compare(facts), facts)


def spread_of(
    ranks: RankSet,
    inspection: Inspection,
    path: str,
    *,
    num_bins: int = _NUM_BINS,
    is_beside: bool = False,
    timeout_s: float | None = None,
) -> Spread | None:
    """Histograms of one tensor of a value, on one scale; None if it has no finite elements.
    Blocks.
    """
    inspector = _Inspector(ranks, inspection.expression, is_beside, inspection.hold, timeout_s)
    return inspector.spread(path, inspection.facts_of(path), num_bins)


class _Inspector:
    """Asks ranks about one expression."""

    def __init__(
        self,
        ranks: RankSet,
        expression: str,
        is_beside: bool,
        hold: Hold | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._ranks = ranks
        self._expression = expression
        self._is_beside = is_beside
        self._hold = hold
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def inspect(self, num_bins: int) -> Inspection:
        looked = self._overview()
        inspection = Inspection(
            self._expression,
            dict(sorted(looked.answers.items())),
            dict(sorted(looked.refusals.items())),
            ranks=self._ranks,
            hold=self._hold,
        )
        facts = inspection.by_path()
        comparisons = {path: compare(of_ranks) for path, of_ranks in facts.items()}
        unequal = [path for path, comparison in comparisons.items() if comparison.unequal]
        for path in unequal[:_MAX_MEASURED]:
            comparisons[path] = self.measured(path, comparisons[path], facts[path])
        spreads = {}
        tensors = [path for path, of_ranks in facts.items() if _scale_of(of_ranks)]
        for path in tensors[:_MAX_SPREADS]:
            spread = self.spread(path, facts[path], num_bins)
            if spread is not None:
                spreads[path] = spread
        return dataclasses.replace(inspection, comparisons=comparisons, spreads=spreads)

    def _overview(self) -> Looked:
        """Follow a path; what is none is evaluated once, by all ranks or none: it may be a
        collective.
        """
        session = self._ranks.session
        forget_what_is_gone(session)
        looked = self._look(self._ranks.ranks, Overview(self._expression, _MAX_ITEMS))
        wanted = [rank for rank, refusal in looked.refusals.items() if refusal.needs_code]
        if not wanted or self._is_beside:
            return looked
        busy = session.catalog.busy_ranks() & set(self._ranks.ranks)
        if busy:
            why = f"{describe_ranks(busy)} {'is' if len(busy) == 1 else 'are'} busy"
            text = f"{self._expression!r} has to run code, on all ranks or on none, and {why}"
            looked.refusals.update(
                dict.fromkeys(set(wanted) - busy, Refusal("CellmeshError", text))
            )
            return looked
        self._hold = Hold(session, wanted)
        subject = Overview(self._expression, _MAX_ITEMS, runs=True)
        again = self._look(wanted, subject, takes_turn=True)
        refusals = {rank: why for rank, why in looked.refusals.items() if rank not in wanted}
        return Looked({**looked.answers, **again.answers}, {**refusals, **again.refusals})

    def spread(self, path: str, facts: Mapping[int, TensorSummary], num_bins: int) -> Spread | None:
        scale = _scale_of(facts)
        if scale is None:
            return None
        ranks = [rank for rank, fact in facts.items() if fact.min is not None]
        looked = self._look(ranks, Histogram(self._expression, path, *scale, num_bins))
        return Spread(
            *scale, {rank: counts.counts for rank, counts in sorted(looked.answers.items())}
        )

    def measured(
        self, path: str, comparison: Comparison, facts: Mapping[int, TensorSummary]
    ) -> Comparison:
        replicas = tuple(
            each
            if each.is_equal
            else dataclasses.replace(each, difference=self._difference(path, each, facts))
            for each in comparison.replicas
        )
        return dataclasses.replace(comparison, replicas=replicas)

    def _difference(
        self, path: str, replicas: Replicas, facts: Mapping[int, TensorSummary]
    ) -> Difference | None:
        """How much replicas differ, from no more than a bounded part of them."""
        one_of_each = [ranks[0] for ranks in replicas.alike]
        shapes = {facts[rank].local_shape for rank in one_of_each}
        if len(shapes) > 1 or None in shapes:
            return None
        most = max(_MAX_COMPARED // len(one_of_each), 1)
        parts = split(((0, facts[one_of_each[0]].num_elements),), _NUM_PARTS)
        for _ in range(_NUM_ROUNDS):  # narrow down to where they differ
            if size_of(parts) <= most:
                break
            looked = self._look(one_of_each, Digests(self._expression, path, parts))
            if looked.refusals:
                return None
            parts = differing(parts, list(looked.answers.values()))
            if len(parts) > _NUM_PARTS // 4:
                break
            parts = split(parts, _NUM_PARTS)
        looked = self._look(one_of_each, Sample(self._expression, path, parts, most))
        if looked.refusals:
            return None
        samples = [looked.answers[rank].values for rank in one_of_each]
        if len({sample.shape for sample in samples}) > 1:  # it has changed meanwhile
            return None
        return Difference(largest_difference(samples), size_of(parts) > most)

    def _look(self, ranks: Sequence[int], subject: OfValue, takes_turn: bool = False) -> Looked:

        return look(
            self._ranks.part(ranks),
            about(subject, self._hold),
            is_beside=self._is_beside,
            takes_turn=takes_turn,
            timeout_s=None
            if self._deadline is None
            else max(0.0, self._deadline - time.monotonic()),
        )


def _scale_of(facts: Mapping[int, TensorSummary]) -> tuple[float, float] | None:
    lows = [fact.min for fact in facts.values() if fact.min is not None]
    highs = [fact.max for fact in facts.values() if fact.max is not None]
    return (min(lows), max(highs)) if lows else None


def _in_words(fact: TensorSummary) -> str:
    return fact.text if fact.shape is None else f"{fact.dtype} {fact.shape}"
