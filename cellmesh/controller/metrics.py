"""What ranks have logged (``cellmesh.log``), kept for plots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..wire.codec import Parcel
from ..wire.messages import Logged

# Of each name on each rank; beyond that, every second point is dropped.
MAX_POINTS = 20_000


@dataclass(frozen=True)
class Series:
    """What one rank has logged under one name.

    Attributes:
        steps: x, in the order logged.
        values: y.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]


@dataclass
class _Kept:
    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, steps: tuple[float, ...], values: tuple[float, ...]) -> None:
        # A step that is not beyond the last: the loop was run again, and its curve begins anew.
        # Within a message steps ascend: ranks see to that.
        if self.steps and steps and steps[0] <= self.steps[-1]:
            self.steps, self.values = [], []
        self.steps += steps
        self.values += values
        if len(self.steps) > MAX_POINTS:
            self.steps, self.values = self.steps[1::2], self.values[1::2]


class Metrics:
    """All that the ranks of a mesh have logged; used on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, dict[int, _Kept]] = {}
        self._watchers: list[Callable[[frozenset[str]], None]] = []
        self._settle_watchers: list[Callable[[], None]] = []

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Logged]) -> None:
        """These ranks have logged this; called in the link's loop."""
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
        """What has been logged."""
        with self._lock:
            return tuple(self._kept)

    def series(self, name: str) -> Mapping[int, Series]:
        """rank -> what it has logged under a name."""
        with self._lock:
            kept = self._kept.get(name, {})
            return {
                rank: Series(tuple(k.steps), tuple(k.values)) for rank, k in sorted(kept.items())
            }

    def watch(self, watcher: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Have somebody told which names have new points, in the link's loop; returns what ends
        that.
        """
        with self._lock:
            self._watchers.append(watcher)

        def end() -> None:
            with self._lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

        return end

    def settle(self) -> None:
        """A cell has ended: its points are all here; called in the link's loop."""
        with self._lock:
            watchers = tuple(self._settle_watchers)
        for watcher in watchers:
            watcher()

    def watch_settling(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Have somebody told of each cell that has ended, in the link's loop; returns what ends
        that.
        """
        with self._lock:
            self._settle_watchers.append(watcher)

        def end() -> None:
            with self._lock:
                if watcher in self._settle_watchers:
                    self._settle_watchers.remove(watcher)

        return end
