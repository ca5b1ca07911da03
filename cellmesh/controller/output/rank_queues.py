"""A queue of output for each rank, and which item of their first ones is to be shown next.

Pure. Adding or taking an item costs the same for any number of ranks: which ranks have an item
first, and how many have it further back, is counted as items come and go.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# How far back in a rank's queue an item is looked for.
LOOK_AHEAD = 32

T = TypeVar("T", bound=Hashable)
Ranks = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Queued(Generic[T]):
    """An item in a rank's queue.

    Attributes:
        item: what was printed.
        arrived_at: when.
        show_by: when it is shown at the latest, whatever others print.
        display_id: of a display, the rank's own id.
        keys: items of ranks that share one are alike.
    """

    item: T
    arrived_at: float
    show_by: float
    display_id: str = ""
    keys: tuple[Hashable, ...] = ()


@dataclass(slots=True)
class _Heads:
    """The ranks that have one item first."""

    ranks: dict[int, None] = field(default_factory=dict)
    lowest_known: int | None = None

    def add(self, rank: int) -> None:
        if not self.ranks:
            self.lowest_known = rank
        elif self.lowest_known is not None:
            self.lowest_known = min(self.lowest_known, rank)
        self.ranks[rank] = None

    def remove(self, rank: int) -> None:
        del self.ranks[rank]
        if rank == self.lowest_known:
            self.lowest_known = None

    def lowest(self) -> int:
        if self.lowest_known is None:
            self.lowest_known = min(self.ranks)
        return self.lowest_known


class RankQueues(Generic[T]):
    """A queue of items for each rank that has any.

    Args:
        goes_before: whether an item is to be shown before another, equal or not. Only of an item
            for which `is_ordered` holds.
        is_ordered: as above.
        is_last: whether a rank has nothing more after an item, so that it may wait for its like
            while others print.
    """

    def __init__(
        self,
        is_ordered: Callable[[T], bool],
        goes_before: Callable[[T, T], bool],
        is_last: Callable[[T], bool] = lambda item: False,
    ) -> None:
        self._is_ordered, self._goes_before, self._is_last = is_ordered, goes_before, is_last
        self._queues: dict[int, collections.deque[Queued[T]]] = {}
        self._heads: dict[T, _Heads] = {}
        self._alike: dict[Hashable, dict[int, None]] = {}  # key -> ranks whose first item has it
        self._windows: dict[int, collections.Counter[T]] = {}  # rank -> its next items
        self._num_ahead: collections.Counter[T] = collections.Counter()  # ranks that have it there
        self._ordered: dict[T, None] = {}  # those of `_num_ahead` for which `is_ordered` holds
        # Heaps. An entry that does not hold any more stays until it is the first.
        self._order: list[tuple[bool, int, int, int, T]] = []
        self._due: list[tuple[float, int, int, Queued[T]]] = []
        self._num_pushed = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, rank: object) -> bool:
        return rank in self._queues

    def append(self, rank: int, queued: Queued[T]) -> None:
        """Add an item behind the others of a rank."""
        queue = self._queues.setdefault(rank, collections.deque())
        queue.append(queued)
        if len(queue) <= LOOK_AHEAD:
            self._enter(rank, queued.item)
        if len(queue) == 1:
            self._lead(rank, queued)

    def prepend(self, rank: int, item: T, now: float, hold_s: float) -> None:
        """Add an item before the others of a rank, as if it had arrived with them; it may wait for
        `hold_s`.
        """
        queue = self._queues.setdefault(rank, collections.deque())
        arrived_at = queue[0].arrived_at if queue else now
        if queue:
            self._follow(rank, queue[0])
        if len(queue) >= LOOK_AHEAD:
            self._leave(rank, queue[LOOK_AHEAD - 1].item)
        queue.appendleft(Queued(item, arrived_at, arrived_at + hold_s))
        self._enter(rank, item)
        self._lead(rank, queue[0])

    def first(self, rank: int) -> T:
        """Return the first item of a rank that has any."""
        return self._queues[rank][0].item

    def take(self, ranks: Ranks) -> list[Queued[T]]:
        """Remove and return the first item of each of these ranks."""
        taken = [self._queues[rank].popleft() for rank in ranks]
        for rank, queued in zip(ranks, taken, strict=True):
            self._follow(rank, queued)
        for rank, queued in zip(ranks, taken, strict=True):
            queue = self._queues[rank]
            self._leave(rank, queued.item)
            if len(queue) >= LOOK_AHEAD:
                self._enter(rank, queue[LOOK_AHEAD - 1].item)
        for rank in ranks:
            if queue := self._queues[rank]:
                self._lead(rank, queue[0])
            else:
                del self._queues[rank], self._windows[rank]
        if not self._queues:
            self._order.clear()
            self._due.clear()
        return taken

    def due_at(self) -> float:
        """Return when the next of the first items is to be shown at the latest; infinite without
        any.
        """
        while self._due:
            show_by, _, rank, queued = self._due[0]
            queue = self._queues.get(rank)
            if queue and queue[0] is queued:
                return show_by
            heapq.heappop(self._due)
        return float("inf")

    def agree(self, ranks: set[int]) -> bool:
        """Return whether all queues begin with the same item or alike, and these ranks have one."""
        queue = next(iter(self._queues.values()))
        num_alike = max((len(self._alike[key]) for key in queue[0].keys), default=0)
        is_one = len(self._heads) == 1 or num_alike == len(self._queues)
        return is_one and ranks <= self._queues.keys()

    def choose(self) -> Ranks:
        """Return the ranks that have the item first which is to be shown next: the one that the
        fewest other ranks have further back, and of these the one of the lowest rank.
        """
        while True:
            *key, _, item = self._order[0]
            heads = self._heads.get(item)
            if heads is None:
                heapq.heappop(self._order)
            elif tuple(key) == self._key(item):
                return tuple(sorted(heads.ranks))
            else:
                heapq.heapreplace(self._order, self._entry(item))

    def alike(self, rank: int) -> Ranks:
        """Return the ranks whose first items are alike to that of `rank`, without those whose item
        others have further back.
        """
        groups = [self._alike[key] for key in self._queues[rank][0].keys]
        most = max(groups, key=len, default=())
        return tuple(sorted(r for r in most if not self._num_coming(self.first(r))))

    # ---- counts

    def _key(self, item: T) -> tuple[bool, int, int]:
        return self._is_last(item), self._num_coming(item), self._heads[item].lowest()

    def _entry(self, item: T) -> tuple[bool, int, int, int, T]:
        self._num_pushed += 1
        return *self._key(item), self._num_pushed, item

    def _num_coming(self, item: T) -> int:
        """Return how many other ranks will have an item that is a first one, or one that is to go
        before it.
        """
        num = self._num_ahead[item] - len(self._heads[item].ranks)
        if self._is_ordered(item):
            num += sum(
                self._num_ahead[other]
                for other in self._ordered
                if other != item and self._goes_before(other, item)
            )
        return num

    def _enter(self, rank: int, item: T) -> None:
        """Count an item that is among a rank's next ones now."""
        window = self._windows.setdefault(rank, collections.Counter())
        window[item] += 1
        if window[item] == 1:
            self._num_ahead[item] += 1
            if self._is_ordered(item):
                self._ordered[item] = None

    def _leave(self, rank: int, item: T) -> None:
        """Count an item no more that is not among a rank's next ones any longer."""
        window = self._windows[rank]
        window[item] -= 1
        if window[item]:
            return
        del window[item]
        self._num_ahead[item] -= 1
        if not self._num_ahead[item]:
            del self._num_ahead[item]
            self._ordered.pop(item, None)
        if item in self._heads:
            self._push(item)
        if self._is_ordered(item):
            for other in self._ordered:
                if other in self._heads:
                    self._push(other)

    def _lead(self, rank: int, queued: Queued[T]) -> None:
        """Note that an item is a rank's first one now."""
        self._heads.setdefault(queued.item, _Heads()).add(rank)
        for key in queued.keys:
            self._alike.setdefault(key, {})[rank] = None
        self._push(queued.item)
        self._num_pushed += 1
        heapq.heappush(self._due, (queued.show_by, self._num_pushed, rank, queued))

    def _follow(self, rank: int, queued: Queued[T]) -> None:
        """Note that an item is not a rank's first one any more."""
        heads = self._heads[queued.item]
        heads.remove(rank)
        if not heads.ranks:
            del self._heads[queued.item]
        for key in queued.keys:
            del self._alike[key][rank]
            if not self._alike[key]:
                del self._alike[key]

    def _push(self, item: T) -> None:
        heapq.heappush(self._order, self._entry(item))
        if len(self._order) > 64 + 4 * len(self._heads):
            self._order = [self._entry(each) for each in self._heads]
            heapq.heapify(self._order)
