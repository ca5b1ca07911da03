"""Where the displays of a mesh's ranks stand in the notebook, across its cells."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .cell_record import Record

_MAX_RECORDS = 16
# Of so many displays, each rank's counted, it is known where they are; then those are forgotten
# that have not changed for longest.
_MAX_PLACES = 10_000

Publish = Callable[[str, dict[str, Any]], None]


class Widgets(Protocol):
    """The ranks' widgets that the front end has open."""

    def is_open(self, model_id: str) -> bool:
        """Whether the front end has this widget open."""


@dataclass(frozen=True)
class DisplayPlace:
    """Where a rank's display is shown.

    Attributes:
        display_id: ours.
        leader: the lowest of its ranks, which it follows.
    """

    display_id: str
    leader: int


@dataclass
class Displays:
    """The displays of a mesh that can be updated, also from a later cell.

    Attributes:
        places: a rank's own id, as (rank, id) -> where it is shown.
        widgets: None where there are none.
        has_tabs: whether cells whose ranks show different things get a switch between ranks.
        records: what the newest cells have shown, for output that comes after a cell's end.
    """

    places: dict[tuple[int, str], DisplayPlace] = field(default_factory=dict)
    widgets: Widgets | None = None
    has_tabs: bool = True
    records: collections.deque[Record] = field(default_factory=collections.deque)

    def put(self, rank: int, theirs: str, place: DisplayPlace) -> None:
        """Note where a rank's display is shown."""
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
