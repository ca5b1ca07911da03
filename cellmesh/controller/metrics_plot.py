"""A plot of what ranks log: which names, of which ranks, and the points to draw. Pure but for its
source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import MeshUsageError
from .live_views import LiveViews
from .metrics import Metrics, Series
from .options import did_you_mean

# What is drawn of a line: more would not be seen.
MAX_DRAWN = 600


@dataclass(frozen=True)
class Band:
    """The mean of ranks at each step, and the least and the most."""

    steps: tuple[float, ...]
    mean: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]


@dataclass(frozen=True)
class Plot:
    """What ranks have logged under some names; in a notebook it shows itself, and goes on.

    Attributes:
        metrics: where it comes from.
        names: one panel each, in this order.
        ranks: whose.
        mean: whether the ranks' mean is drawn, with a band from the least to the most.
        shown: what keeps it up to date.
    """

    metrics: Metrics
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    mean: bool = False
    shown: LiveViews = field(default_factory=LiveViews, repr=False, compare=False)

    def series(self, name: str) -> Mapping[int, Series]:
        """rank -> what it has logged under a name."""
        return {rank: one for rank, one in self.metrics.series(name).items() if rank in self.ranks}

    def __repr__(self) -> str:
        lines = []
        for name in self.names:
            series = self.series(name)
            if not series:
                lines.append(f"{name}: nothing logged yet: {how_to(name)}")
            for rank, one in series.items():
                lines.append(
                    f"{name} [{rank}] {len(one.values)} points, last {one.values[-1]:.4g}, "
                    f"least {min(one.values):.4g}, most {max(one.values):.4g}"
                )
        return "\n".join(lines)


def plot(
    metrics: Metrics,
    names: Sequence[str],
    ranks: Sequence[int],
    mean: bool = False,
    shown: LiveViews | None = None,
) -> Plot:
    """A plot of names, which may be logged later.

    Raises:
        MeshUsageError: no name, or one that is none.
    """
    if not names:
        known = ", ".join(metrics.names())
        raise MeshUsageError(f"name what to plot: {known or how_to('loss')}")
    for name in names:
        if not name.isidentifier():
            raise MeshUsageError(
                f"{name!r} is no name: plot what ranks log, {how_to('loss')}"
                f"{did_you_mean(name, metrics.names())}"
            )
    return Plot(metrics, tuple(dict.fromkeys(names)), tuple(ranks), mean, shown or LiveViews())


def how_to(name: str) -> str:
    """How a name comes to be logged."""
    return f"`cellmesh.log({name}=..., step=...)` in a cell on the ranks"


def thin(series: Series, limit: int = MAX_DRAWN) -> Series:
    """A line with at most `limit` points (and two) that looks the same: of each piece the least and
    the most.

    Args:
        series: the line.
        limit: an even number.
    """
    count = len(series.values)
    if count <= limit:
        return series
    keep = {0, count - 1}
    pieces = limit // 2
    for piece in range(pieces):
        here = range(piece * count // pieces, (piece + 1) * count // pieces)
        keep.add(min(here, key=series.values.__getitem__))
        keep.add(max(here, key=series.values.__getitem__))
    chosen = sorted(keep)
    return Series(
        tuple(series.steps[index] for index in chosen),
        tuple(series.values[index] for index in chosen),
    )


def band(series: Mapping[int, Series]) -> Band:
    """The mean, least and most of ranks at the steps that any of them has, NaN left out."""
    at: dict[float, list[float]] = {}
    for one in series.values():
        for step, value in zip(one.steps, one.values, strict=True):
            if value == value:
                at.setdefault(step, []).append(value)
    steps = tuple(sorted(at))
    return Band(
        steps,
        tuple(_mean(at[step]) for step in steps),
        tuple(min(at[step]) for step in steps),
        tuple(max(at[step]) for step in steps),
    )


def _mean(values: Sequence[float]) -> float:
    # Of what has diverged, too: `statistics.fmean` raises where infinities meet, or a sum has none.
    return sum(value / len(values) for value in values)
