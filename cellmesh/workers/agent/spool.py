"""The agent's queue of messages that no controller has acknowledged yet. Pure.

While an attached controller keeps up, messages of ranks are passed on at once. Otherwise they wait
here. Output is bounded, and the oldest is dropped first; answers are kept, as runs wait for them.
Of runs in flight, answers that an earlier controller has received are kept, too, so that the next
controller receives all of them. Messages other than output are bounded for each rank: beyond the
bound, the rank is not read while a controller is attached, and values are left out of the answers
that are kept for the next controller.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...wire.attach import RunInfo
from ...wire.codec import Frame, Parcel
from ...wire.limits import COUNTED_BYTES, MAX_ANSWER_BYTES
from ...wire.messages import (
    AgentFault,
    Died,
    Done,
    Failed,
    Ranked,
    Relay,
    StartFailed,
    Stopped,
    StoreDied,
    StoreUp,
)
from ...wire.payload import stand_in
from ...wire.segments import SegmentFrame
from ...wire.user_code import Bar, Display, InputCancelled, InputRequest, Logged, Output, Skipped

MAX_OUTPUT_BYTES = 64 << 20
# Size limit of one message that joins waiting ones.
CHUNK_BYTES = 1 << 20
# Lowest number of the controller's internal runs, which end with the controller.
_FIRST_OWN_RUN = 1 << 40
_LEAST_BYTES = 500  # memory of a parcel without its content
_OUTPUT = (Output, Skipped, Display, Bar)
# Messages that concern any controller, not only the one that asked for them.
_LASTING = (
    *(Output, Skipped, Display, Bar, Done, Failed, InputRequest, InputCancelled),
    *(Died, StoreDied, StoreUp, AgentFault, StartFailed, Stopped),
)
# (ranks, run, number)
BarKey = tuple[tuple[int, ...], int, int]


@dataclass
class _Flight:
    """A run in flight, and the answers to it that a controller has acknowledged."""

    info: RunInfo
    waiting: set[int]
    answers: list[tuple[Parcel[Any], tuple[int, ...]]] = field(default_factory=list)  # ranks
    asks: dict[int, Parcel[Any]] = field(default_factory=dict)


class Spool:
    """The queue of ranks' messages that cannot be sent to a controller yet, and the answers to
    unfinished runs, which the next controller receives again.

    Attributes:
        ahead: ranks that must not be read, as too many of their bytes wait.
        num_dropped_bytes: bytes of output dropped since the last controller left.
        next_run: a number above those of all runs so far.
    """

    def __init__(
        self, max_output_bytes: int = MAX_OUTPUT_BYTES, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        self._max_output_bytes = max_output_bytes
        self._max_answer_bytes = max_answer_bytes
        self._entries: collections.OrderedDict[int, Parcel[Any]] = collections.OrderedDict()
        self._next_entry = 0
        # Entries that may be dropped.
        self._output: collections.deque[int] = collections.deque()
        self._output_bytes = 0
        # Bytes by rank: those that wait here, except output, and those of answers that are kept.
        self._waiting: collections.Counter[int] = collections.Counter()
        self._kept: collections.Counter[int] = collections.Counter()
        self.ahead: set[int] = set()
        self._bars: dict[BarKey, int] = {}  # entries to be replaced by the bar's next state
        self._skipped: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._flights: dict[int, _Flight] = {}
        self._is_attended = False
        self.num_dropped_bytes = 0
        self.next_run = 1

    # ---- runs

    def begin(self, order: Relay) -> None:
        """Note a run that the controller sends to ranks."""
        if order.run < 0 or order.run >= _FIRST_OWN_RUN:
            return
        self.next_run = max(self.next_run, order.run + 1)
        if order.channel == "work":
            info = RunInfo(order.run, order.ranks, order.title, order.execution_count)
            self._flights[order.run] = _Flight(info, set(order.ranks))

    def forget_runs(self) -> None:
        """Forget all runs, as their ranks are being replaced."""
        self._flights.clear()
        self._kept.clear()

    def replied(self, ranks: Iterable[int]) -> None:
        """Note that the user has answered these ranks' requests for input."""
        for flight in self._flights.values():
            for rank in ranks:
                flight.asks.pop(rank, None)

    def has_asks(self) -> bool:
        """Return whether a rank waits for the user to answer a request for input."""
        return any(flight.asks for flight in self._flights.values())

    def runs(self) -> tuple[RunInfo, ...]:
        """Return the runs that are not acknowledged as ended on all ranks, oldest first."""
        return tuple(flight.info for _, flight in sorted(self._flights.items()))

    def acked(self, parcels: Iterable[Parcel[Any]]) -> None:
        """Note that a controller has acknowledged these messages."""
        for parcel in parcels:
            match parcel.verb:
                case Ranked(ranks, Done(run=run) | Failed(run=run)):
                    self._note_answer(run, ranks, parcel)
                case Ranked(ranks, InputRequest(run=run)) if run in self._flights:
                    self._flights[run].asks.update(dict.fromkeys(ranks, parcel))
                case Ranked(ranks, InputCancelled(run=run)) if run in self._flights:
                    for rank in ranks:
                        self._flights[run].asks.pop(rank, None)
                case Died(rank):
                    for run in list(self._flights):
                        if rank in self._flights[run].waiting:
                            self._note_answer(run, (rank,), parcel)

    # ---- waiting messages

    def __bool__(self) -> bool:
        return bool(self._entries) or bool(self._skipped)

    def add(self, parcels: Iterable[Parcel[Any]]) -> None:
        """Queue messages that cannot be sent to a controller now."""
        for parcel in parcels:
            if not self._is_attended:
                kept = self._fit_for_others(parcel)
                if kept is None:
                    continue
                parcel = kept
            if _is_bar(parcel.verb):
                entry = self._bars.setdefault(_bar_key(parcel), self._next_entry)
                if entry != self._next_entry:
                    self._entries[entry] = parcel
                    continue
            self._entries[self._next_entry] = parcel
            if type(parcel.verb) is Ranked and type(parcel.verb.verb) in _OUTPUT:
                self._output.append(self._next_entry)
                self._output_bytes += size_of(parcel)
            else:
                self._count(parcel, size_of(parcel))
            self._next_entry += 1
        while self._output_bytes > self._max_output_bytes:
            self._drop_oldest_output()

    def take(self, max_bytes: int = CHUNK_BYTES) -> list[Parcel[Any]]:
        """Remove and return the oldest messages, to be sent to the controller as one message."""
        taken: list[Parcel[Any]] = [
            Parcel(Ranked(ranks, Skipped(run, num_lines, num_bytes)))
            for (ranks, run), (num_lines, num_bytes) in self._skipped.items()
        ]
        self._skipped.clear()
        num_bytes = 0
        while self._entries and num_bytes < max_bytes:
            number, parcel = self._entries.popitem(last=False)
            size = size_of(parcel)
            if self._output and self._output[0] == number:
                self._output.popleft()
                self._output_bytes -= size
            else:
                self._count(parcel, -size)
            if _is_bar(parcel.verb):
                del self._bars[_bar_key(parcel)]
            num_bytes += size
            taken.append(parcel)
        return taken

    # ---- attaching and leaving controllers

    def leave(self, unacked: Iterable[Sequence[Parcel[Any]]]) -> None:
        """Note that the controller has left: queue its unacknowledged messages again, within the
        memory limits that apply without a controller.
        """
        waiting = [*(parcel for message in unacked for parcel in message), *self._entries.values()]
        self._clear_entries()
        self._is_attended, self.num_dropped_bytes = False, 0
        self.add(waiting)

    def attend(self, state: Parcel[Any], deaths: Sequence[Died]) -> None:
        """Queue the mesh's state, deaths and kept answers for a controller that attaches."""
        dead = {died.rank for died in deaths}
        # The mesh's state includes ranks that died and have been replaced since.
        waiting = [
            p for p in self._entries.values() if type(p.verb) is not Died or p.verb.rank in dead
        ]
        to_come = {parcel.verb.rank for parcel in waiting if type(parcel.verb) is Died}
        before: list[Parcel[Any]] = []
        asks: list[Parcel[Any]] = []
        for _, flight in sorted(self._flights.items()):
            # Leave out deaths of ranks that have been replaced since; the mesh's state, which
            # follows, includes their successors.
            answers = [answer for answer, _ in flight.answers]
            before += [answer for answer in answers if getattr(answer.verb, "rank", -1) not in dead]
            asks += dict.fromkeys(flight.asks.values())
            flight.answers, flight.asks, flight.waiting = [], {}, set(flight.info.ranks)
        self._kept.clear()
        told = [Parcel(died) for died in deaths if died.rank not in to_come]
        self._clear_entries()
        self._is_attended, self.num_dropped_bytes = True, 0
        self.add([*before, state, *told, *asks, *waiting])

    # ---- internal

    def _count(self, parcel: Parcel[Any], num_bytes: int) -> None:
        """Add to the number of waiting bytes of a message's ranks; a negative number subtracts."""
        for rank in _givers(parcel):
            self._waiting[rank] += num_bytes
            if self._waiting[rank] > self._max_answer_bytes:
                self.ahead.add(rank)
            else:
                self.ahead.discard(rank)

    def _room(self, ranks: Iterable[int]) -> int:
        """Return how many bytes a value of these ranks may have to be kept; small values always
        fit.
        """
        used = max((self._waiting[rank] + self._kept[rank] for rank in ranks), default=0)
        return max(COUNTED_BYTES, self._max_answer_bytes - used)

    def _note_answer(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        flight = self._flights.get(run)
        if flight is None:
            return
        flight.waiting.difference_update(ranks)
        for rank in ranks:
            flight.asks.pop(rank, None)
        if flight.waiting:
            light = _lighten(parcel, self._room(ranks))
            flight.answers.append((light, ranks))
            self._kept.update(dict.fromkeys(ranks, size_of(light)))
            return
        del self._flights[run]
        for answer, givers in flight.answers:
            self._kept.subtract(dict.fromkeys(givers, size_of(answer)))

    def _fit_for_others(self, parcel: Parcel[Any]) -> Parcel[Any] | None:
        """Return the part of a message to keep while no controller is attached, if any."""
        verb: Any = parcel.verb.verb if type(parcel.verb) is Ranked else parcel.verb
        if type(verb) not in _LASTING:
            return None
        if type(verb) not in (Done, Failed):
            return parcel
        if verb.run not in self._flights:  # an internal run of a controller that has left
            return None
        return _lighten(parcel, self._room(_givers(parcel)))

    def _drop_oldest_output(self) -> None:
        parcel = self._entries.pop(self._output.popleft())
        size = size_of(parcel)
        self._output_bytes -= size
        self.num_dropped_bytes += size
        verb = parcel.verb.verb
        if type(verb) is Bar:
            del self._bars[_bar_key(parcel)]
            return
        lines = self._skipped.setdefault((parcel.verb.ranks, verb.run), [0, 0])
        if type(verb) is Skipped:
            lines[0] += verb.num_lines
            lines[1] += verb.num_bytes
        else:
            lines[0] += verb.text.count("\n") if type(verb) is Output else 1
            lines[1] += size

    def _clear_entries(self) -> None:
        self._entries.clear()
        self._output.clear()
        self._bars.clear()
        self._output_bytes = 0
        self._waiting.clear()
        self.ahead.clear()


def size_of(parcel: Parcel[Any]) -> int:
    """Return the approximate memory of a message with its buffers, in bytes."""
    verb = parcel.verb.verb if type(parcel.verb) is Ranked else parcel.verb
    match verb:
        case Output():
            return len(verb.text)
        case Display():
            return len(verb.bundle)
        case Done() | Failed():
            traceback = len(verb.traceback) if isinstance(verb, Failed) else 0
            stream = len(verb.payload.stream) if verb.payload is not None else 0
            return _LEAST_BYTES + traceback + stream + sum(map(_num_bytes, parcel.buffers))
        case Logged():
            return _LEAST_BYTES + 16 * len(verb.steps) * len(verb.names)
    return _LEAST_BYTES


def _num_bytes(frame: Frame) -> int:
    return frame.num_bytes if isinstance(frame, SegmentFrame) else len(frame)


def _givers(parcel: Parcel[Any]) -> tuple[int, ...]:
    """Return the ranks that have sent a message; () for a message of the agent itself."""
    return parcel.verb.ranks if type(parcel.verb) is Ranked else ()


def _is_bar(verb: Any) -> bool:
    return type(verb) is Ranked and type(verb.verb) is Bar


def _bar_key(parcel: Parcel[Any]) -> BarKey:
    return parcel.verb.ranks, parcel.verb.verb.run, parcel.verb.verb.bar


def _lighten(parcel: Parcel[Any], max_bytes: int) -> Parcel[Any]:
    """Replace the value in a run's answer by one that raises when loaded, if it is too large."""
    size = size_of(parcel)
    if size <= max_bytes or type(parcel.verb) is Died or parcel.verb.verb.payload is None:
        return parcel
    verb = parcel.verb.verb
    text = (
        f"it was {size / 1e6:,.0f} MB, too much to keep until somebody was attached. The run "
        "ended well on the rank: ask for the value again (mesh.pull)"
    )
    left: dict[str, Any] = {"payload": stand_in(text)}
    if type(verb) is Failed:
        left = {"payload": None, "why_no_payload": "it was too large to keep"}
    return Parcel(Ranked(parcel.verb.ranks, msgspec.structs.replace(verb, **left)))
