"""What a cell's output area shows, by rank and bounded, with each display in its latest state; and
where the displays of a mesh's ranks stand across cells.

Pure. The switch between ranks is made of the record (`rank_tabs`), and it is drawn again when only
some ranks clear their output.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .fold import AlikeLines, Item, Line, Ranks, Rich, Trace

BUDGET_BYTES = 400_000
_ENTRY_BYTES = 100  # what an entry costs beside its text
_MAX_RECORDS = 16
# Of so many displays, each rank's counted, it is known where they are; then those are forgotten
# that have not changed for longest.
_MAX_PLACES = 10_000

Publish = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class RecordEntry:
    """One item (text, display, remark) of a cell's output area.

    Attributes:
        ranks: whose it is; empty for what is nobody's (remarks).
        item: what it is.
        display_id: ours, of a display that can be updated.
        content: what was published for it, where that is not made of `item` again.
    """

    ranks: Ranks
    item: Item | None
    display_id: str = ""
    content: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def num_bytes(self) -> int:
        """About how many bytes the item takes."""
        return _ENTRY_BYTES + 8 * len(self.ranks) + _size(self.item) + len(str(self.content))


@dataclass(frozen=True)
class RecordedOutput:
    """The output of one rank in a cell, without what was dropped from the record.

    Attributes:
        items: in the rank's order.
        dropped: stands for the older items that are not there; equal for ranks that lost the same.
    """

    items: tuple[Item, ...]
    dropped: int = 0


class Record:
    """Remembers the items of one cell's output area, to show them again by rank or after a clear.

    Args:
        budget_bytes: about how much; beyond twice of it, the oldest output of those ranks goes that
            have the most.
    """

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._size = 0
        self._entries: list[RecordEntry] = []
        self._dropped: dict[int, int] = {}
        self._is_off = False

    @property
    def entries(self) -> Sequence[RecordEntry]:
        """The items of the output area, from top to bottom."""
        return self._entries

    def switch_off(self) -> None:
        """Forget the items; from now on note only which ranks have output in the area, because it
        is too much to remember.
        """
        self._is_off = True
        self._dropped = {rank: 1 for entry in self._entries for rank in entry.ranks} | self._dropped
        self._entries, self._size = [], 0

    def empty(self) -> None:
        """Note that the cell's output area was cleared."""
        self._entries, self._size, self._dropped = [], 0, {}

    def add(self, entry: RecordEntry) -> None:
        """Note that an item was shown below all others."""
        if self._is_off:
            self._dropped.update(dict.fromkeys(entry.ranks, 1))
            return
        self._entries.append(entry)
        self._size += entry.num_bytes
        if self._size > 2 * self._budget:
            self._shrink()

    def replace(self, entry: RecordEntry) -> None:
        """Note that an item replaced the one with its `display_id`, if there is one."""
        for index in range(len(self._entries) - 1, -1, -1):
            old = self._entries[index]
            if old.display_id == entry.display_id:
                # Ranks that share a display show what its lowest rank shows.
                self._entries[index] = replace(entry, ranks=old.ranks)
                self._size += self._entries[index].num_bytes - old.num_bytes
                if self._size > 2 * self._budget:
                    self._shrink()
                return

    def holds(self, ranks: Iterable[int]) -> bool:
        """Return whether any of these ranks has output in the area, remembered or not."""
        these = set(ranks)
        return any(
            not these.isdisjoint(each)
            for each in (self._dropped, *(e.ranks for e in self._entries))
        )

    def cost_of_others(self, ranks: Iterable[int]) -> float:
        """Return how many bytes must be shown again if these ranks clear their output; infinite if
        not all of it is remembered.
        """
        these = set(ranks)
        if not these.issuperset(self._dropped):
            return float("inf")
        return sum(entry.num_bytes for entry in self._entries if not these.issuperset(entry.ranks))

    def clear(self, ranks: Iterable[int]) -> None:
        """Remove these ranks' output; items that other ranks share stay theirs."""
        gone = set(ranks)
        kept: list[RecordEntry] = []
        for entry in self._entries:
            left = tuple(rank for rank in entry.ranks if rank not in gone)
            if left == entry.ranks:
                kept.append(entry)
            elif left:
                kept.append(replace(entry, ranks=left))
        self._keep(kept)
        for rank in gone:
            self._dropped.pop(rank, None)

    def by_rank(self) -> dict[int, RecordedOutput]:
        """Return the remembered output of each rank."""
        if self._is_off:
            return {}
        items: dict[int, list[Item]] = {rank: [] for rank in self._dropped}
        for entry in self._entries:
            own = dict(entry.item.lines) if isinstance(entry.item, AlikeLines) else {}
            if entry.item is not None:
                for rank in entry.ranks:
                    items.setdefault(rank, []).append(own.get(rank, entry.item))
        return {
            rank: RecordedOutput(tuple(items[rank]), self._dropped.get(rank, 0))
            for rank in sorted(items)
        }

    def joined_lines(self) -> list[tuple[Ranks, Item]]:
        """Return the remembered lines of all ranks, each by itself; none where no lines are joined
        in the area.
        """
        if not any(isinstance(entry.item, AlikeLines) for entry in self._entries):
            return []
        lines: list[tuple[Ranks, Item]] = []
        for entry in self._entries:
            if isinstance(entry.item, AlikeLines):
                lines += [((r,), line) for r, line in entry.item.lines if r in entry.ranks]
            elif isinstance(entry.item, Line) and entry.ranks:
                lines.append((entry.ranks, entry.item))
        return lines

    def _keep(self, entries: list[RecordEntry]) -> None:
        self._entries = entries
        self._size = sum(entry.num_bytes for entry in entries)

    def _shrink(self) -> None:
        """Drop the oldest items of the ranks that have more than an equal share of the limit."""
        costs: dict[int, float] = {}
        for entry in self._entries:
            for rank in entry.ranks or (-1,):
                costs[rank] = costs.get(rank, 0.0) + entry.num_bytes / max(1, len(entry.ranks))
        left = dict.fromkeys(costs, share(costs.values(), self._budget))
        kept: list[RecordEntry] = []
        dropped: list[RecordEntry] = []
        for entry in reversed(self._entries):
            cost = entry.num_bytes / max(1, len(entry.ranks))
            for rank in entry.ranks or (-1,):
                left[rank] -= cost
            ranks = tuple(rank for rank in entry.ranks if left[rank] >= 0)
            if ranks or (not entry.ranks and left[-1] >= 0):
                kept.append(replace(entry, ranks=ranks))
            if len(ranks) < len(entry.ranks):
                dropped.append(
                    replace(entry, ranks=tuple(r for r in entry.ranks if r not in ranks))
                )
        for entry in reversed(dropped):
            for rank in entry.ranks:
                self._dropped[rank] = hash((self._dropped.get(rank, 0), entry.item)) or 1
        self._keep(kept[::-1])


def share(costs: Iterable[float], budget: float) -> float:
    """Return the size at which texts must be cut so that all together fit into the budget (max-min
    fair).
    """
    waiting = sorted(costs)
    while waiting:
        each = budget / len(waiting)
        if waiting[0] > each:
            return each
        budget -= waiting.pop(0)
    return float("inf")


def _size(item: Item | None) -> int:
    match item:
        case Line(_, text):
            return len(text)
        case AlikeLines(lines):
            return sum(_ENTRY_BYTES + len(line.text) for _, line in lines)
        case Rich(_, bundle):
            return len(bundle)
        case Trace(_, text, traceback, whole):
            return len(text) + len(traceback) + len(whole)
    return 0


@dataclass(frozen=True)
class DisplayPlace:
    """The notebook's id of a display that ranks share, and the lowest rank, which updates it."""

    display_id: str
    leader: int


@dataclass
class Displays:
    """The displays of a mesh that can be updated, also from a later cell.

    Attributes:
        places: a rank's own id, as (rank, id) -> where it is shown.
        has_tabs: whether cells whose ranks show different things get a switch between ranks.
        folds_numbers: whether lines of ranks that differ only in numbers are joined.
        records: what the newest cells have shown, for output that comes after a cell's end.
    """

    places: dict[tuple[int, str], DisplayPlace] = field(default_factory=dict)
    has_tabs: bool = True
    folds_numbers: bool = True
    records: collections.deque[Record] = field(default_factory=collections.deque)

    def put(self, rank: int, theirs: str, place: DisplayPlace) -> None:
        """Note where the notebook shows a rank's display, so that it can be updated."""
        self.places.pop((rank, theirs), None)
        self.places[rank, theirs] = place  # last
        if len(self.places) > _MAX_PLACES:
            del self.places[next(iter(self.places))]

    def keep(self, record: Record) -> None:
        """Remember the record of a run that has ended, and forget those of the oldest runs."""
        if record not in self.records:
            self.records.append(record)
        while len(self.records) > _MAX_RECORDS:
            self.records.popleft().switch_off()
