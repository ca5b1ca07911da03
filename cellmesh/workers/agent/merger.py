"""Joins what ranks say alike, so that eight equal answers travel as one message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...wire.framing import Frame, Parcel
from ...wire.messages import Done, Failed, FromRank, Ranked

# How long an answer waits for its like from other ranks.
HOLD_S = 0.005


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
        if self._oldest is None:
            self._oldest = now
        kind = type(verb)
        if kind is Done or kind is Failed:
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
        return None if self._oldest is None else self._oldest + HOLD_S

    def take(self, now: float) -> list[Parcel[Ranked]]:
        """What is to be sent now: all that waits, or nothing."""
        if self._oldest is None or not (self._urgent or now >= self._oldest + HOLD_S):
            return []
        parcels = [Parcel(Ranked(tuple(sorted(slot.ranks)), slot.verb), slot.buffers) for slot in self._slots]
        self._slots, self._latest_slot, self._last_of_rank = [], {}, {}
        self._oldest, self._urgent = None, False
        return parcels

    def _count_down(self, run: int, by: int) -> None:
        left = self._expected.get(run)
        if left is None:
            return
        if left > by:
            self._expected[run] = left - by
        else:
            del self._expected[run]
            self._urgent = True
