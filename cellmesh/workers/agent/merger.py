"""Joins equal messages of ranks, so that eight equal answers travel as one message.

How far a progress bar is may wait, for the bars of other ranks and for its own next word: they
travel ten times a second at most, whatever the number of ranks.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...wire.codec import Frame, Parcel
from ...wire.messages import Done, Failed, FromRank, Ranked
from ...wire.user_code import Bar, Output

# How long an answer waits for its like from other ranks.
HOLD_S = 0.005
# How long text waits for its like, where it is folded.
HOLD_TEXT_S = 0.03
# How long bars wait, unless their rank says something else.
HOLD_BARS_S = 0.1


@dataclass
class _Slot:
    verb: FromRank
    ranks: list[int]
    buffers: tuple[Frame, ...]


@dataclass
class _Said:
    kind: Any
    key: Any
    verb: FromRank
    buffers: tuple[Frame, ...]
    text: str


@dataclass
class Merger:
    """Collects ranks' messages, merges equal ones and keeps each rank's order; releases them when a
    run's last expected answer or a failure arrives, else after a short delay.

    Attributes:
        folds_text: messages travel to another host: text that ranks print waits longer, failures
            wait, too, and what several ranks print alike is merged line by line.
    """

    folds_text: bool = False
    _slots: list[_Slot] = field(default_factory=list)
    _latest_slot: dict[Any, int] = field(default_factory=dict)
    _last_of_rank: dict[int, int] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)
    # Rank -> (run, bar) -> it.
    _bars: dict[int, dict[tuple[int, int], Bar]] = field(default_factory=dict)
    _bars_due: float | None = None
    _oldest: float | None = None
    _urgent: bool = False
    _has_text_alone: bool = True

    def expect(self, run: int, num_ranks: int) -> None:
        """Note that this many ranks will answer a run."""
        self._expected[run] = num_ranks

    def forget(self, run: int) -> None:
        """Note that one rank less will answer a run: it has answered, or died."""
        left = self._expected.get(run, 0)
        if left > 1:
            self._expected[run] = left - 1
        elif left == 1:
            del self._expected[run]
            self._urgent = True

    def add(self, rank: int, parcel: Parcel[Any], now: float) -> None:
        """Collect a message of a rank, joined with an equal one of other ranks if there is one."""
        verb, buffers = parcel
        kind = type(verb)
        if kind is Bar:
            self._bars.setdefault(rank, {})[(verb.run, verb.bar)] = verb
            if self._bars_due is None:
                self._bars_due = now + HOLD_BARS_S
            return
        if rank in self._bars:
            self._let_bars_go(rank)
        if self._oldest is None:
            self._oldest = now
        if self.folds_text and kind is not Output:
            self._has_text_alone = False
        if kind is Done or kind is Failed:
            self._urgent |= kind is Failed and not self.folds_text
            left = self._expected.get(verb.run)
            if left is not None and left > 1:
                self._expected[verb.run] = left - 1
            elif left is not None:
                self.forget(verb.run)
        if not buffers:
            slot = self._latest_slot.get(verb)
            if slot is not None and slot > self._last_of_rank.get(rank, -1):
                self._slots[slot].ranks.append(rank)
                self._last_of_rank[rank] = slot
                return
            self._latest_slot[verb] = len(self._slots)
        self._last_of_rank[rank] = len(self._slots)
        self._slots.append(_Slot(verb, [rank], buffers))

    def rank_ended(self, rank: int, now: float) -> None:
        """Note that a rank has ended, and let its progress bars' states be taken soon."""
        if rank in self._bars:
            self._oldest = now if self._oldest is None else self._oldest
            self._let_bars_go(rank)

    def deadline(self) -> float | None:
        """Return the time at which `take` must be called; None if no message waits."""
        hold_s = HOLD_TEXT_S if self.folds_text and self._has_text_alone else HOLD_S
        if self._oldest is None or (
            self._bars_due is not None and self._bars_due < self._oldest + hold_s
        ):
            return self._bars_due
        return self._oldest + hold_s

    def take(self, now: float) -> list[Parcel[Ranked]]:
        """Remove and return the collected messages if one is urgent or has waited long enough, else
        an empty list; progress bars may wait longer.
        """
        if self._bars_due is not None and now >= self._bars_due:
            for rank in list(self._bars):  # behind what their ranks have said before
                self._let_bars_go(rank)
            self._bars_due, self._urgent = None, True
        hold_s = HOLD_TEXT_S if self.folds_text and self._has_text_alone else HOLD_S
        if not self._urgent and (self._oldest is None or now < self._oldest + hold_s):
            return []
        slots = _fold_texts(self._slots) if self.folds_text else self._slots
        parcels = [
            Parcel(Ranked(tuple(sorted(slot.ranks)), slot.verb), slot.buffers) for slot in slots
        ]
        self._slots, self._latest_slot, self._last_of_rank = [], {}, {}
        self._oldest, self._urgent, self._has_text_alone = None, False, True
        return parcels

    def _let_bars_go(self, rank: int) -> None:
        """Put a rank's progress bars in line before its next message of another kind."""
        for bar in self._bars.pop(rank, {}).values():
            self._last_of_rank[rank] = len(self._slots)
            self._slots.append(_Slot(bar, [rank], ()))


# A line, or what is written over it after a carriage return.
_PIECE = re.compile(r"\r*[^\r\n]*(?:\r?\n)?")


def _fold_texts(slots: Sequence[_Slot]) -> Iterator[_Slot]:
    """Join each rank's text that follows text of the same stream, then what several ranks say
    alike, text line by line; a message goes first that no other rank says later.
    """
    queues: dict[int, collections.deque[_Said]] = {}
    numbers: collections.Counter[Any] = collections.Counter()  # of what a rank says several times
    for slot in slots:
        for rank in slot.ranks:
            _queue(queues.setdefault(rank, collections.deque()), rank, slot, numbers)
    later = collections.Counter(
        said.key for queue in queues.values() for said in itertools.islice(queue, 1, None)
    )
    while queues:
        heads: dict[Any, list[int]] = {}
        for rank, queue in queues.items():
            heads.setdefault(queue[0].key, []).append(rank)
        key = next((each for each in heads if not later[each]), next(iter(heads)))
        said = {rank: queues[rank].popleft() for rank in heads[key]}
        for rank in said:
            if queues[rank]:
                later[queues[rank][0].key] -= 1
            else:
                del queues[rank]
        first = said[heads[key][0]]
        if type(first.verb) is not Output:
            yield _Slot(first.verb, heads[key], first.buffers)
            continue
        pieces = {rank: _PIECE.findall(each.text)[:-1] for rank, each in said.items()}
        for ranks, text in _fold(pieces):
            yield _Slot(Output(first.verb.run, first.verb.stream, text), ranks, ())


def _queue(
    queue: collections.deque[_Said], rank: int, slot: _Slot, numbers: collections.Counter[Any]
) -> None:
    """Put what a rank has said behind what it said before; its key is the same for ranks that say
    the same, and another each time.
    """
    verb = slot.verb
    kind: Any = (verb.run, verb.stream) if type(verb) is Output else verb
    text = verb.text if type(verb) is Output else ""
    if queue and text and queue[-1].kind == kind:
        queue[-1].text += text
        return
    numbers[rank, kind] += 1
    key = id(slot) if slot.buffers else (kind, numbers[rank, kind])
    queue.append(_Said(kind, key, verb, slot.buffers, text))


def _fold(pieces: Mapping[int, Sequence[str]]) -> Iterator[tuple[list[int], str]]:
    """Yield what ranks say alike from the start, then what is left of each that says more."""
    groups: dict[str, list[int]] = {}
    for rank, own in pieces.items():
        if own:
            groups.setdefault(own[0], []).append(rank)
    for ranks in groups.values():
        said = [pieces[rank] for rank in ranks]
        alike = [each[0] for each in itertools.takewhile(_are_equal, zip(*said, strict=False))]
        yield ranks, "".join(alike)
        yield from _fold({rank: pieces[rank][len(alike) :] for rank in ranks})


def _are_equal(pieces: Sequence[str]) -> bool:
    return len(set(pieces)) == 1
