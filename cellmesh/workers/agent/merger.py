"""Merges equal messages of ranks, so that eight equal answers travel as one message.

States of progress bars may wait for those of other ranks and for their own next state: they are
sent at most ten times a second, whatever the number of ranks, while ranks send nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...wire.codec import Frame, Parcel
from ...wire.messages import Done, Failed, FromRank, Ranked
from ...wire.verbs import Bar

# How long an answer waits for equal ones of other ranks.
HOLD_S = 0.005
# How long states of bars wait, unless a rank sends another message.
HOLD_BARS_S = 0.1


class Answers(NamedTuple):
    """A rank's message that consists of plain answers (`Done` without a value), as its encoded
    header and decoded.
    """

    header: bytes
    parcels: Sequence[Parcel[Any]]
    runs: tuple[int, ...]


def find_answers(header: bytes, parcels: Sequence[Parcel[Any]]) -> Answers | None:
    """Return a decoded message as plain answers; None if it contains anything else."""
    verbs = [verb for verb, _ in parcels if type(verb) is Done and verb.payload is None]
    if not verbs or len(verbs) < len(parcels):
        return None
    return Answers(header, parcels, tuple([verb.run for verb in verbs]))


@dataclass
class _Slot:
    verb: FromRank
    ranks: list[int]
    buffers: tuple[Frame, ...]
    since: float


@dataclass
class Merger:
    """Collects messages of ranks, merges equal ones, and keeps the order of each rank's messages;
    returns them for sending when a run's last answer or a failure arrives, else after a short
    delay.

    Slots are numbered for the life of the merger; a number below `_first` is of one that was taken.
    """

    _slots: list[_Slot] = field(default_factory=list)
    _first: int = 0
    _latest_slot: dict[Any, int] = field(default_factory=dict)
    _last_of_rank: dict[int, int] = field(default_factory=dict)
    # Header of plain answers -> numbers of their slots.
    _slots_of: dict[bytes, list[int]] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)
    # Run -> number of the latest slot of its answers, which need not be equal.
    _last_answer: dict[int, int] = field(default_factory=dict)
    # Rank -> (run, bar) -> slot of its state, which the next state replaces.
    _bars: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    _bars_due: float | None = None
    _oldest: float | None = None
    _urgent: int = 0  # how many of the slots, from the first one, must be sent now

    def expect(self, run: int, num_ranks: int) -> None:
        """Record how many ranks will answer a run (a cell or call)."""
        self._expected[run] = num_ranks

    def forget(self, run: int) -> None:
        """Reduce by one the number of ranks that will still answer a run, as one has died."""
        if self._was_last(run):
            self._urgent = len(self._slots)

    def _was_last(self, run: int) -> bool:
        left = self._expected.get(run, 0)
        if left > 1:
            self._expected[run] = left - 1
        elif left == 1:
            del self._expected[run]
        return left == 1

    def add(self, rank: int, parcel: Parcel[Any], now: float) -> None:
        """Add a rank's message; merge it with an equal message of other ranks, unless that would
        change the order of the rank's messages.
        """
        verb, buffers = parcel
        kind = type(verb)
        if kind is Bar:
            self._add_bar(rank, verb, now)
            return
        self._bars.pop(rank, None)
        if self._oldest is None:
            self._oldest = now
        is_answer = kind is Done or kind is Failed
        is_urgent = (is_answer and self._was_last(verb.run)) or kind is Failed
        number = None if buffers else self._latest_slot.get(verb)
        if number is not None and number > self._last_of_rank.get(rank, -1):
            self._slots[number - self._first].ranks.append(rank)
        else:
            number = self._first + len(self._slots)
            if not buffers:
                self._latest_slot[verb] = number
            if is_answer:
                self._last_answer[verb.run] = number
            self._slots.append(_Slot(verb, [rank], buffers, now))
        self._last_of_rank[rank] = number
        if is_urgent:
            self._urgent = max(self._urgent, self._last_answer[verb.run] - self._first + 1)

    def add_answers(self, rank: int, answers: Answers, now: float) -> None:
        """Add each of a rank's plain answers; if another rank has just sent the same ones, all of
        them are merged at once.
        """
        numbers = self._slots_of.get(answers.header)
        if numbers is None or numbers[0] <= self._last_of_rank.get(rank, -1):
            self._slots_of[answers.header] = numbers = []
            for parcel in answers.parcels:
                self.add(rank, parcel, now)
                numbers.append(self._last_of_rank[rank])
            return
        self._bars.pop(rank, None)
        self._last_of_rank[rank] = numbers[-1]
        for run, number in zip(answers.runs, numbers, strict=True):
            self._slots[number - self._first].ranks.append(rank)
            left = self._expected.get(run, 0)  # as `_was_last`
            if left > 1:
                self._expected[run] = left - 1
            elif left == 1:
                del self._expected[run]
                self._urgent = max(self._urgent, self._last_answer[run] - self._first + 1)

    def _add_bar(self, rank: int, bar: Bar, now: float) -> None:
        new = self._first + len(self._slots)
        number = self._bars.setdefault(rank, {}).setdefault((bar.run, bar.bar), new)
        if number < new:
            self._slots[number - self._first].verb = bar
            return
        self._last_of_rank[rank] = number
        self._slots.append(_Slot(bar, [rank], (), now))
        if self._bars_due is None:
            self._bars_due = now + HOLD_BARS_S

    def rank_ended(self, rank: int, now: float) -> None:
        """End the delay for progress bars' states if this rank, whose process has ended, has sent
        any.
        """
        if rank in self._bars:
            self._bars_due = now

    def deadline(self) -> float | None:
        """Return when `Merger.take` must be called next; None if no message waits."""
        if self._urgent:
            return 0.0
        if self._oldest is None:
            return self._bars_due
        due = self._oldest + HOLD_S
        return due if self._bars_due is None else min(due, self._bars_due)

    def take(self, now: float) -> list[Parcel[Ranked]]:
        """Remove and return all collected messages if one has waited long enough (progress bars may
        wait longer), those up to the last urgent one if there is any, else an empty list.
        """
        if (due := self.deadline()) is None or now < due:
            return []
        is_old = self._oldest is None or now >= self._oldest + HOLD_S
        num = len(self._slots) if is_old or self._bars or not self._urgent else self._urgent
        taken, self._slots = self._slots[:num], self._slots[num:]
        self._bars, self._bars_due, self._urgent = {}, None, 0
        if self._slots:
            for number, slot in enumerate(taken, self._first):
                if self._latest_slot.get(slot.verb) == number:
                    del self._latest_slot[slot.verb]
            least, self._oldest = self._first + num, self._slots[0].since
            self._slots_of = {key: of for key, of in self._slots_of.items() if of[0] >= least}
            self._last_answer = {run: at for run, at in self._last_answer.items() if at >= least}
        else:
            self._latest_slot, self._last_of_rank, self._slots_of = {}, {}, {}
            self._last_answer = {}
            self._oldest = None
        self._first += num
        return [
            Parcel(Ranked(tuple(sorted(slot.ranks)), slot.verb), slot.buffers) for slot in taken
        ]
