"""The result of an inspection: a value on each rank, compared between replicas, with histograms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...wire.inspect import (
    Refusal,
    TensorSummary,
    ValueSummary,
)
from ...wire.ranks import describe_groups
from .query import PinnedValue
from .replica_diff import (
    Comparison,
)

if TYPE_CHECKING:
    from ..rank_set import RankSet


@dataclass(frozen=True)
class Spread:
    """The histograms of one tensor on all ranks, on one scale.

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
        pinned: keeps the value on its ranks, if code was run for it; None if it is found anew each
            time.
        took_s: how long that took.
    """

    expression: str
    found: Mapping[int, ValueSummary]
    refusals: Mapping[int, Refusal] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    ranks: RankSet | None = None
    pinned: PinnedValue | None = None
    took_s: float = 0.0

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the value's tensors, on any rank; "" is the value itself."""
        return tuple(self.by_path())

    @property
    def is_one(self) -> bool:
        """Whether the value is one tensor or plain value on each rank, not a nest."""
        return all([item.path for item in found.items] == [""] for found in self.found.values())

    @property
    def torn(self) -> tuple[int, ...]:
        """The ranks that ran while they were inspected: their values may be torn."""
        return tuple(rank for rank, found in self.found.items() if found.is_torn)

    def facts_of(self, path: str) -> dict[int, TensorSummary]:
        """rank -> the summary at a path."""
        return self.by_path().get(path, {})

    def by_path(self) -> dict[str, dict[int, TensorSummary]]:
        """path -> rank -> summary, in the order of the first rank that has the path."""
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


def _in_words(fact: TensorSummary) -> str:
    return fact.text if fact.shape is None else f"{fact.dtype} {fact.shape}"
