"""Numbers that ranks log with `cellmesh.log`, and plots of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ..errors import MeshUsageError, did_you_mean
from ..wire.codec import Parcel
from ..wire.ranks import describe_ranks
from ..wire.verbs import Logged
from .live_views import LiveViews

# Points per name and rank; beyond that, every second point is dropped.
MAX_POINTS = 20_000
# Points drawn per line: more would not be visible.
MAX_DRAWN = 600
# Called with the names that have new points, and with None once a cell has ended and all of its
# points have arrived.
Watcher = Callable[[frozenset[str] | None], None]


class Series(msgspec.Struct, frozen=True):
    """The points that one rank has logged under one name.

    Attributes:
        steps: x values, in the order logged.
        values: y values.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]


class _Kept(msgspec.Struct):
    steps: list[float] = msgspec.field(default_factory=list)
    values: list[float] = msgspec.field(default_factory=list)

    def add(self, steps: tuple[float, ...], values: tuple[float, ...]) -> None:
        # A step not beyond the last means that the loop was run again, so the curve starts over.
        # Within a message steps ascend: ranks ensure that.
        if self.steps and steps and steps[0] <= self.steps[-1]:
            self.steps, self.values = [], []
        self.steps += steps
        self.values += values
        if len(self.steps) > MAX_POINTS:
            self.steps, self.values = self.steps[1::2], self.values[1::2]


class Metrics:
    """All points that the ranks of a mesh have logged; usable on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, dict[int, _Kept]] = {}
        self._watchers: list[Watcher] = []

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Logged]) -> None:
        """Add points that these ranks have logged; called in the event loop of the connection to
        the agent.
        """
        verb = parcel.verb
        with self._lock:
            for name, values in zip(verb.names, verb.values, strict=True):
                by_rank = self._kept.setdefault(name, {})
                for rank in ranks:
                    by_rank.setdefault(rank, _Kept()).add(verb.steps, values)
            watchers = tuple(self._watchers)
        for watcher in watchers:
            watcher(frozenset(verb.names))

    def names(self) -> tuple[str, ...]:
        """Return the names under which ranks have logged numbers."""
        with self._lock:
            return tuple(self._kept)

    def series(self, name: str) -> Mapping[int, Series]:
        """Return, for each rank, the points that it has logged under a name."""
        with self._lock:
            kept = self._kept.get(name, {})
            return {
                rank: Series(tuple(k.steps), tuple(k.values)) for rank, k in sorted(kept.items())
            }

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Register a function to call, in the event loop of the connection to the agent, when
        points are logged or a cell ends; return a function that unregisters it.
        """
        with self._lock:
            self._watchers.append(watcher)

        def end() -> None:
            with self._lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

        return end

    def settle(self) -> None:
        """Notify the watchers that a cell has ended; called after all points that the cell has
        logged.
        """
        with self._lock:
            watchers = tuple(self._watchers)
        for watcher in watchers:
            watcher(None)


@dataclass(frozen=True)
class Plot:
    """A plot of logged numbers; a notebook displays it and keeps it up to date.

    Attributes:
        metrics: source of the points.
        names: names to plot, one panel each, in this order.
        ranks: ranks to plot.
        mean: whether to show first the mean over ranks, with a band from minimum to maximum.
        shown: live views of the mesh, with which the plot is registered.
    """

    metrics: Metrics
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    mean: bool = False
    shown: LiveViews = field(default_factory=LiveViews, repr=False, compare=False)

    def series(self, name: str) -> Mapping[int, Series]:
        """Return, for each rank of the plot, the points that it has logged under a name."""
        return {rank: one for rank, one in self.metrics.series(name).items() if rank in self.ranks}

    def __repr__(self) -> str:
        lines = []
        for name in self.names:
            series = self.series(name)
            if not series:
                lines.append(f"{name}: nothing logged yet: {how_to(name)}")
            if nans := describe_nans(series):
                lines.append(f"{name}: {nans}")
            for rank, one in series.items():
                numbers = [value for value in one.values if value == value] or [math.nan]
                lines.append(
                    f"{name} [{rank}] {len(one.values)} points, last {one.values[-1]:.4g}, "
                    f"least {min(numbers):.4g}, most {max(numbers):.4g}"
                )
        return "\n".join(lines)


def describe_nans(series: Mapping[int, Series]) -> str:
    """Describe the ranks whose line has NaN, with the first such step; "" without NaN."""
    found: dict[int, float] = {}
    for rank, one in series.items():
        steps = (step for step, value in zip(one.steps, one.values, strict=True) if value != value)
        if (first := next(steps, None)) is not None:
            found[rank] = first
    if not found:
        return ""
    at = min(found.values())
    later = [rank for rank, step in found.items() if step > at]
    more = f", later on {describe_ranks(later)}" if later else ""
    return f"first NaN on {describe_ranks(found.keys() - later)} at step {at:.6g}{more}"


def plot(
    metrics: Metrics,
    names: Sequence[str],
    ranks: Sequence[int],
    mean: bool = False,
    shown: LiveViews | None = None,
) -> Plot:
    """Make a plot of the numbers logged under these names, now or later.

    Raises:
        MeshUsageError: no names are given, or one is not an identifier.
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
    """Return a hint on how to log numbers under a name."""
    return f"`cellmesh.log({name}=..., step=...)` in a cell on the ranks"


def thin(series: Series, limit: int = MAX_DRAWN) -> Series:
    """Reduce a line to about `limit` points that look the same when drawn: of each stretch, the
    minimum, the maximum and the first NaN.

    Args:
        series: the line.
        limit: maximum number of points, even; the ends and one NaN per stretch may be added.
    """
    count = len(series.values)
    if count <= limit:
        return series
    keep = {0, count - 1}
    pieces = limit // 2
    for piece in range(pieces):
        here = range(piece * count // pieces, (piece + 1) * count // pieces)
        numbers = [index for index in here if series.values[index] == series.values[index]]
        if len(numbers) < len(here):  # there are NaN
            keep.add(next(index for index in here if series.values[index] != series.values[index]))
        if numbers:
            keep.add(min(numbers, key=series.values.__getitem__))
            keep.add(max(numbers, key=series.values.__getitem__))
    chosen = sorted(keep)
    return Series(
        tuple(series.steps[index] for index in chosen),
        tuple(series.values[index] for index in chosen),
    )
