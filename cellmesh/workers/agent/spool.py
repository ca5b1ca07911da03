"""The agent's store of messages that no controller has acknowledged yet. Pure.

While an attached controller keeps up, messages of ranks are passed on at once. Otherwise they wait
here. Output is bounded, and the oldest is dropped first; answers are kept, as runs wait for them.
Of runs in flight, answers that an earlier controller has received are kept, too, so that the next
one gets all of them. What is not output is bounded for each rank (`GivenBytes`): beyond the bound,
the rank is not read while a controller is attached, and its values are left out while none is.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...wire.attach import RunInfo
from ...wire.codec import Frame, Parcel
from ...wire.limits import COUNTED_BYTES, MAX_ANSWER_BYTES, may_wait_for
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
from ...wire.status import RankState
from ...wire.user_code import Bar, Display, InputCancelled, InputRequest, Logged, Output, Skipped

MAX_OUTPUT_BYTES = 64 << 20
# What one message may hold of what has waited.
CHUNK_BYTES = 1 << 20
# Runs of the controller's own, which end with it.
_FIRST_OWN_RUN = 1 << 40
# Of progress bars, the last word of so many is kept.
MAX_BARS = 1000
_LEAST_BYTES = 500  # that a parcel takes, whatever is in it
_OUTPUT = (Output, Skipped, Display)
# What means something to a controller that did not ask for it.
_LASTING = (
    *(Output, Skipped, Display, Bar, Done, Failed, InputRequest, InputCancelled),
    *(Died, StoreDied, StoreUp, AgentFault, StartFailed, Stopped),
)
# (ranks, run, number)
BarKey = tuple[tuple[int, ...], int, int]


class GivenBytes:
    """Counts, by rank, the bytes that a rank has given and that no controller is done with (they
    wait, or are results of unfinished runs), and decides which ranks are not read.

    Attributes:
        num_bytes: rank -> those bytes.
        ahead: the ranks that are not read: those beyond the limit, but for those that another rank
            may wait for.
        waits: the states of ranks that waited for others when they were last asked.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.num_bytes: collections.Counter[int] = collections.Counter()
        self.waits: dict[int, RankState] = {}
        self.ahead: set[int] = set()

    def count(self, ranks: Iterable[int], num_bytes: int) -> None:
        """Add to the bytes of each of these ranks; negative once the controller is done with
        them.
        """
        for rank in ranks:
            self.num_bytes[rank] += num_bytes
            if self.num_bytes[rank] <= self._limit_bytes:
                self.ahead.discard(rank)
            elif not self._is_awaited(rank):
                self.ahead.add(rank)

    def room(self, ranks: Iterable[int]) -> int:
        """Return how large a value of each of these ranks is kept; small ones always are."""
        used = max((self.num_bytes[rank] for rank in ranks), default=0)
        return max(COUNTED_BYTES, self._limit_bytes - used)

    def note_state(self, ranks: Iterable[int], state: RankState) -> None:
        """Note whether these ranks wait in a collective for other ranks."""
        for rank in ranks:
            if state.collective:
                self.waits[rank] = state
            else:
                self.waits.pop(rank, None)
        self._find_ahead()

    def note_going_on(self, ranks: Iterable[int]) -> None:
        """Note that these ranks have ended a run, and so wait in no collective any longer."""
        if waiting := self.waits.keys() & set(ranks):
            for rank in waiting:
                del self.waits[rank]
            self._find_ahead()

    def _is_awaited(self, rank: int) -> bool:
        """Return whether another rank may wait in a collective for this rank's next run."""
        return any(
            may_wait_for(state, (rank,)) for other, state in self.waits.items() if other != rank
        )

    def _find_ahead(self) -> None:
        self.ahead = {
            rank
            for rank, num_bytes in self.num_bytes.items()
            if num_bytes > self._limit_bytes and not self._is_awaited(rank)
        }


@dataclass
class _Flight:
    """A run in flight, and those of its answers that a controller has acknowledged."""

    info: RunInfo
    waiting: set[int]
    # As kept; by whom; how much it was.
    answers: list[tuple[Parcel[Any], tuple[int, ...], int]] = field(default_factory=list)
    asks: dict[int, Parcel[Any]] = field(default_factory=dict)
    # By rank and number: they go on.
    bars: dict[tuple[int, int], Parcel[Any]] = field(default_factory=dict)


class Spool:
    """The queue of ranks' messages that cannot be sent to a controller yet, and the answers to
    unfinished runs, which the next controller receives again.

    Attributes:
        given: how much each rank has given, and which ranks are not read.
        num_dropped_bytes: of output, since the last controller left.
        next_run: above every run that was seen.
    """

    def __init__(
        self, max_output_bytes: int = MAX_OUTPUT_BYTES, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        self._max_output_bytes = max_output_bytes
        self._max_answer_bytes = max_answer_bytes
        self._entries: collections.OrderedDict[int, Parcel[Any]] = collections.OrderedDict()
        self._next_entry = 0
        # Those entries that may be dropped.
        self._output: collections.deque[int] = collections.deque()
        self._output_bytes = 0
        self.given = GivenBytes(max_answer_bytes)
        self._bars: dict[BarKey, int] = {}  # entries that a bar's next word replaces
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
        """Forget all runs, whose ranks are being replaced."""
        self._flights.clear()
        self._count_again()

    def replied(self, ranks: Iterable[int]) -> None:
        """Note that the user has answered these ranks' requests for input."""
        for flight in self._flights.values():
            for rank in ranks:
                flight.asks.pop(rank, None)

    def has_asks(self) -> bool:
        """Return whether a rank waits for the user to answer a request for input."""
        return any(flight.asks for flight in self._flights.values())

    def runs(self) -> tuple[RunInfo, ...]:
        """Return the runs with answers that no controller has acknowledged, oldest first."""
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
                case Ranked(_, Bar()):
                    self._note_bar(parcel)
                case Ranked(ranks, RankState() as state):
                    self.given.note_state(ranks, state)
                case Died(rank):
                    for run in list(self._flights):
                        if rank in self._flights[run].waiting:
                            self._note_answer(run, (rank,), parcel)

    # ---- what waits

    def __bool__(self) -> bool:
        return bool(self._entries) or bool(self._skipped)

    def add(self, parcels: Iterable[Parcel[Any]]) -> None:
        """Keep messages that cannot be sent to a controller now."""
        for parcel in parcels:
            if not self._is_attended:
                kept = self._fit_for_others(parcel)
                if kept is None:
                    continue
                parcel = kept
            if _is_bar(parcel.verb) and self._replace_bar(parcel):
                continue
            self._entries[self._next_entry] = parcel
            if type(parcel.verb) is Ranked and type(parcel.verb.verb) in _OUTPUT:
                self._output.append(self._next_entry)
                self._output_bytes += size_of(parcel)
            else:
                self.given.count(_givers(parcel), size_of(parcel))
            self._next_entry += 1
        while self._output_bytes > self._max_output_bytes:
            self._drop_oldest_output()

    def take(self, max_bytes: int = CHUNK_BYTES) -> list[Parcel[Any]]:
        """Remove and return the oldest messages, to be sent to the controller as one."""
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
                self.given.count(_givers(parcel), -size)
            if _is_bar(parcel.verb):
                del self._bars[_bar_key(parcel)]
            num_bytes += size
            taken.append(parcel)
        return taken

    # ---- who attends

    def leave(self, unacked: Iterable[Sequence[Parcel[Any]]]) -> None:
        """Note that the controller has left: queue again the messages that it has not
        acknowledged, within the memory limits that apply without a controller.
        """
        waiting = [*(parcel for message in unacked for parcel in message), *self._entries.values()]
        self._clear_entries()
        self._is_attended, self.num_dropped_bytes = False, 0
        self.add(waiting)

    def attend(self, state: Parcel[Any], deaths: Sequence[Died]) -> None:
        """Order the messages for a controller that attaches: the mesh's state goes first."""
        dead = {died.rank for died in deaths}
        # Who died and was replaced since lives: the mesh's state has it.
        waiting = [
            p for p in self._entries.values() if type(p.verb) is not Died or p.verb.rank in dead
        ]
        to_come = {parcel.verb.rank for parcel in waiting if type(parcel.verb) is Died}
        before: list[Parcel[Any]] = []
        asks: list[Parcel[Any]] = []
        bars: list[Parcel[Any]] = []
        for _, flight in sorted(self._flights.items()):
            # One that died and was replaced since is not dead: the mesh's state, which comes later,
            # says so.
            answers = [answer for answer, *_ in flight.answers]
            before += [answer for answer in answers if getattr(answer.verb, "rank", -1) not in dead]
            asks += dict.fromkeys(flight.asks.values())
            bars += flight.bars.values()
            flight.bars = {}
            flight.answers, flight.asks, flight.waiting = [], {}, set(flight.info.ranks)
        told = [Parcel(died) for died in deaths if died.rank not in to_come]
        self._clear_entries()
        self._is_attended, self.num_dropped_bytes = True, 0
        self.add([*before, state, *told, *asks, *bars, *waiting])

    # ---- inside

    def _note_bar(self, parcel: Parcel[Any]) -> None:
        """Keep the last state of a progress bar that a controller has received, for the next
        controller.
        """
        bar: Bar = parcel.verb.verb
        flight = self._flights.get(bar.run)
        if flight is None:
            return
        for rank in parcel.verb.ranks:
            flight.bars.pop((rank, bar.bar), None)
            if bar.state == "open" and len(flight.bars) < MAX_BARS:
                flight.bars[(rank, bar.bar)] = Parcel(Ranked((rank,), bar))

    def _replace_bar(self, parcel: Parcel[Any]) -> bool:
        """Replace an earlier state of a progress bar in the queue; return whether there was one."""
        key = _bar_key(parcel)
        if key in self._bars:
            self._entries[self._bars[key]] = parcel
            return True
        self._bars[key] = self._next_entry
        if len(self._bars) > MAX_BARS:
            oldest = next(iter(self._bars))
            dropped = self._entries.pop(self._bars.pop(oldest))
            self.given.count(_givers(dropped), -size_of(dropped))
        return False

    def _note_answer(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        flight = self._flights.get(run)
        if flight is None:
            return
        flight.waiting.difference_update(ranks)
        for rank in ranks:
            flight.asks.pop(rank, None)
        if self.given.waits:
            self.given.note_going_on(ranks)
        if flight.waiting:
            light = _lighten(parcel, self.given.room(ranks))
            self.given.count(ranks, size_of(parcel))
            flight.answers.append((light, ranks, size_of(parcel)))
            return
        del self._flights[run]
        for _, givers, num_bytes in flight.answers:
            self.given.count(givers, -num_bytes)

    def _count_again(self) -> None:
        """Count the bytes that ranks have given from the start, after ranks were replaced or the
        waiting messages changed.
        """
        self.given = GivenBytes(self._max_answer_bytes)
        for flight in self._flights.values():
            for _, givers, num_bytes in flight.answers:
                self.given.count(givers, num_bytes)
        output = set(self._output)
        for number, parcel in self._entries.items():
            if number not in output:
                self.given.count(_givers(parcel), size_of(parcel))

    def _fit_for_others(self, parcel: Parcel[Any]) -> Parcel[Any] | None:
        """Return the part of a message to keep while no controller is attached; None if nothing."""
        verb: Any = parcel.verb.verb if type(parcel.verb) is Ranked else parcel.verb
        if type(verb) not in _LASTING:
            return None
        if type(verb) not in (Done, Failed):
            return parcel
        if verb.run not in self._flights:  # a control thread's, or a heal's: who asked has gone
            return None
        return _lighten(parcel, self.given.room(_givers(parcel)))

    def _drop_oldest_output(self) -> None:
        parcel = self._entries.pop(self._output.popleft())
        size = size_of(parcel)
        self._output_bytes -= size
        self.num_dropped_bytes += size
        verb = parcel.verb.verb
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
        self._count_again()


def size_of(parcel: Parcel[Any]) -> int:
    """Return about how much memory a message with its buffers takes, in bytes."""
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
    """Return the ranks that have sent a message; none of the agent's own."""
    return parcel.verb.ranks if type(parcel.verb) is Ranked else ()


def _is_bar(verb: Any) -> bool:
    return type(verb) is Ranked and type(verb.verb) is Bar


def _bar_key(parcel: Parcel[Any]) -> BarKey:
    return parcel.verb.ranks, parcel.verb.verb.run, parcel.verb.verb.bar


def _lighten(parcel: Parcel[Any], max_bytes: int) -> Parcel[Any]:
    """Replace the value of a run's answer by one that raises when loaded, if it is too large."""
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
