"""Joins what ranks say alike, so that eight equal answers travel as one message.

How far a progress bar is may wait, for the bars of other ranks and for its own next word: they travel ten
times a second at most, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...wire.framing import Frame, Parcel
from ...wire.messages import Bar, Done, Failed, FromRank, Ranked

# How long an answer waits for its like from other ranks.
HOLD_S = 0.005
# How long a bar waits that is known to the controller and goes on.
HOLD_BARS_S = 0.1
_MAX_OPEN_BARS = 10_000


@dataclass
class _Slot:
    verb: FromRank
    ranks: list[int]
    buffers: tuple[Frame, ...]


@dataclass
class Merger:
    """Gathers verbs from ranks; each rank's own order is kept.

    Call `expect` for every run that is passed to ranks: once all have answered nothing waits any longer.
    """

    _slots: list[_Slot] = field(default_factory=list)
    _latest_slot: dict[Any, int] = field(default_factory=dict)
    _last_of_rank: dict[int, int] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)
    _open_bars: set[tuple[int, int, int]] = field(default_factory=set)  # (rank, run, bar)
    _waiting_bars: dict[tuple[int, int, int], Bar] = field(default_factory=dict)
    _bars_due: float | None = None
    _oldest: float | None = None
    _urgent: bool = False

    def expect(self, run: int, num_ranks: int) -> None:
        """This many ranks will answer this run."""
        self._expected[run] = num_ranks

    def forget(self, run: int, num_ranks: int = 1) -> None:
        """This many ranks will never answer this run."""
        self._count_down(run, num_ranks)

    def add(self, rank: int, parcel: Parcel[Any], now: float) -> None:
        """Take in what a rank said."""
        verb, buffers = parcel
        kind = type(verb)
        if kind is Bar and self._holds_bar(rank, verb, now):
            return
        if self._oldest is None:
            self._oldest = now
        if kind is Done or kind is Failed:
            self._let_bars_go(rank, verb.run)
            self._urgent |= kind is Failed
            self._count_down(verb.run, 1)
        if not buffers:
            slot = self._latest_slot.get(verb)
            if slot is not None and slot > self._last_of_rank.get(rank, -1):
                self._slots[slot].ranks.append(rank)
                self._last_of_rank[rank] = slot
                return
            self._latest_slot[verb] = len(self._slots)
        self._last_of_rank[rank] = len(self._slots)
        self._slots.append(_Slot(verb, [rank], buffers))

    def deadline(self) -> float | None:
        """When `take` will give something, if nothing more comes; None if nothing waits."""
        others = None if self._oldest is None else self._oldest + HOLD_S
        return min((at for at in (others, self._bars_due) if at is not None), default=None)

    def take(self, now: float) -> list[Parcel[Ranked]]:
        """What is to be sent now: all that waits, or nothing."""
        parcels: list[Parcel[Ranked]] = []
        if self._bars_due is not None and now >= self._bars_due:
            parcels = [Parcel(Ranked((key[0],), bar)) for key, bar in self._waiting_bars.items()]
            self._waiting_bars.clear()
            self._bars_due = None
        if self._oldest is None or not (self._urgent or now >= self._oldest + HOLD_S):
            return parcels
        parcels += [
            Parcel(Ranked(tuple(sorted(slot.ranks)), slot.verb), slot.buffers) for slot in self._slots
        ]
        self._slots, self._latest_slot, self._last_of_rank = [], {}, {}
        self._oldest, self._urgent = None, False
        return parcels

    def _holds_bar(self, rank: int, bar: Bar, now: float) -> bool:
        """Whether a bar's word waits; its first and its last pass with all else that its rank says."""
        key = (rank, bar.run, bar.bar)
        if bar.state != "open":
            self._open_bars.discard(key)
            self._waiting_bars.pop(key, None)
            return False
        if key not in self._open_bars:
            if len(self._open_bars) >= _MAX_OPEN_BARS:  # of ranks that have died, most of them
                self._open_bars.clear()
            self._open_bars.add(key)
            return False
        self._waiting_bars[key] = bar
        if self._bars_due is None:
            self._bars_due = now + HOLD_BARS_S
        return True

    def _let_bars_go(self, rank: int, run: int) -> None:
        """A rank ends a run: how far its bars have come goes before."""
        for key in [key for key in self._waiting_bars if key[:2] == (rank, run)]:
            self._last_of_rank[rank] = len(self._slots)
            self._slots.append(_Slot(self._waiting_bars.pop(key), [rank], ()))

    def _count_down(self, run: int, by: int) -> None:
        left = self._expected.get(run)
        if left is None:
            return
        if left > by:
            self._expected[run] = left - by
        else:
            del self._expected[run]
            self._urgent = True
