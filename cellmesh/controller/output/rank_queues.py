"""A queue of output items for each rank, and the choice of the first item to show next. Pure.

Adding or taking an item has the same cost for any number of ranks: for each item, the ranks that
have it first and the number of ranks that have it further back are updated with each change.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Number of items at the front of a rank's queue that are searched for an item.
LOOK_AHEAD = 32

T = TypeVar("T", bound=Hashable)
Ranks = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Queued(Generic[T]):
    """An item in a rank's queue.

    Attributes:
        item: the item.
        arrived_at: time of its arrival.
        show_by: latest time to show it, even if other ranks have not printed it.
        display_id: the rank's own id of a display.
        keys: items with a common key may be joined; set once the item is its rank's first.
    """

    item: T
    arrived_at: float
    show_by: float
    display_id: str = ""
    keys: tuple[Hashable, ...] = ()


@dataclass(slots=True)
class _Heads:
    """The ranks whose queues begin with the same item."""

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
    """A queue of items for each rank that has items.

    Args:
        is_last: returns whether an item is its rank's last, so that it may wait for equal items
            while other ranks print.
        keys_of: returns the keys of a rank's item.
    """

    def __init__(
        self,
        is_last: Callable[[T], bool],
        keys_of: Callable[[int, T], tuple[Hashable, ...]] = lambda rank, item: (),
    ) -> None:
        self._is_last, self._keys_of = is_last, keys_of
        self._queues: dict[int, collections.deque[Queued[T]]] = {}
        self._heads: dict[T, _Heads] = {}
        self._alike: dict[Hashable, dict[int, None]] = {}  # key -> ranks whose first item has it
        self._windows: dict[int, collections.Counter[T]] = {}  # rank -> its `LOOK_AHEAD` next items
        self._num_ahead: collections.Counter[T] = collections.Counter()  # -> ranks with it in these
        # Heaps; a stale entry stays until it is the first.
        self._order: list[tuple[bool, int, int, int, T]] = []
        self._due: list[tuple[float, int, int, Queued[T]]] = []
        self._num_pushed = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, rank: object) -> bool:
        return rank in self._queues

    def append(self, rank: int, queued: Queued[T]) -> None:
        """Add an item at the end of a rank's queue."""
        queue = self._queues.setdefault(rank, collections.deque())
        queue.append(queued)
        if len(queue) <= LOOK_AHEAD:
            self._enter(rank, queued.item)
        if len(queue) == 1:
            self._lead(rank, queued)

    def prepend(self, rank: int, item: T, now: float, hold_s: float) -> None:
        """Add an item at the front of a rank's queue, as if it had arrived together with the item
        behind it; it may wait `hold_s` seconds from that time.
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
        """Return the first item of a rank, which must have one."""
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

    def take_common(self) -> tuple[Ranks, Sequence[Sequence[Queued[T]]]]:
        """Remove and return the items with which all queues begin in common, and the ranks, if this
        is a flood: the items that follow are counted again, at a cost of `LOOK_AHEAD` items each.
        """
        if len(self._heads) != 1:
            return (), ()
        queues = dict(sorted(self._queues.items()))
        rows = [
            *itertools.takewhile(
                lambda row: all(each.item == row[0].item for each in row),
                zip(*queues.values(), strict=False),
            )
        ]
        if len(rows) <= LOOK_AHEAD:
            return (), ()
        for counts in (self._heads, self._alike, self._windows, self._num_ahead):
            counts.clear()
        self._order.clear()
        self._due.clear()
        for rank, queue in queues.items():
            for _ in rows:
                queue.popleft()
            for queued in itertools.islice(queue, LOOK_AHEAD):
                self._enter(rank, queued.item)
            if queue:
                self._lead(rank, queue[0])
            else:
                del self._queues[rank]
        return tuple(queues), rows

    def due_at(self) -> float:
        """Return the time by which one of the queues' first items must be shown; infinite without
        items.
        """
        while self._due:
            show_by, _, rank, queued = self._due[0]
            queue = self._queues.get(rank)
            if queue and queue[0] is queued:
                return show_by
            heapq.heappop(self._due)
        return float("inf")

    def agree(self, ranks: set[int]) -> bool:
        """Return whether the first items of all queues are equal or can be joined, and each of
        `ranks` has a queue.
        """
        queue = next(iter(self._queues.values()))
        num_alike = max((len(self._alike[key]) for key in queue[0].keys), default=0)
        is_one = len(self._heads) == 1 or num_alike == len(self._queues)
        return is_one and ranks <= self._queues.keys()

    def choose(self) -> Ranks:
        """Return the ranks whose queues begin with the item to show next: the item that is behind
        the first place in the fewest other queues, and of several such items that of the lowest
        rank.
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
        """Return the ranks whose first items can be joined with the first item of `rank`, without
        items that are also further back in the queue of another rank.
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
        """Return the number of ranks in whose queues an item, the first of another queue, is
        further back.
        """
        return self._num_ahead[item] - len(self._heads[item].ranks)

    def _enter(self, rank: int, item: T) -> None:
        """Count an item that has moved into a rank's next `LOOK_AHEAD` items."""
        window = self._windows.setdefault(rank, collections.Counter())
        window[item] += 1
        if window[item] == 1:
            self._num_ahead[item] += 1

    def _leave(self, rank: int, item: T) -> None:
        """Stop counting an item that is no longer among a rank's next `LOOK_AHEAD` items."""
        window = self._windows[rank]
        window[item] -= 1
        if window[item]:
            return
        del window[item]
        self._num_ahead[item] -= 1
        if not self._num_ahead[item]:
            del self._num_ahead[item]
        if item in self._heads:
            self._push(item)

    def _lead(self, rank: int, queued: Queued[T]) -> None:
        """Record that an item has become the first in a rank's queue."""
        queued.keys = self._keys_of(rank, queued.item)
        self._heads.setdefault(queued.item, _Heads()).add(rank)
        for key in queued.keys:
            self._alike.setdefault(key, {})[rank] = None
        self._push(queued.item)
        self._num_pushed += 1
        heapq.heappush(self._due, (queued.show_by, self._num_pushed, rank, queued))

    def _follow(self, rank: int, queued: Queued[T]) -> None:
        """Record that an item is no longer the first in a rank's queue."""
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
