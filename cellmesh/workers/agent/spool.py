"""The agent's queue of messages that no controller has acknowledged yet. It does no input or output
itself.

While an attached controller keeps up, messages of ranks are passed on at once. Otherwise they wait
here. Output is bounded, and the oldest is dropped first, except that of a script while its
controller is attached; answers are kept, as runs wait for them.
Of runs in flight, answers that an earlier controller has received are kept, too, without large
values, so that the next controller receives all of them. Messages other than output are bounded for
each rank: beyond the bound, the rank is not read while a controller is attached, and values are
left out of the answers that wait for the next controller.
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
from ...wire.peer_calls import Routed
from ...wire.segments import SegmentFrame
from ...wire.verbs import Bar, Display, InputCancelled, InputRequest, Logged, Output, Skipped

MAX_OUTPUT_BYTES = 64 << 20
# Size limit of one message that joins waiting ones.
CHUNK_BYTES = 1 << 20
# Lowest number of the controller's internal runs, which end with the controller.
_FIRST_OWN_RUN = 1 << 40
_LEAST_BYTES = 500  # memory of a parcel without its content
_OUTPUT = (Output, Skipped, Display, Bar)
# Those that show a run to the user.
_OF_RUN = (*_OUTPUT, InputRequest, InputCancelled, Failed)
# Messages that concern any controller, not only the one that asked for them.
_LASTING = (
    *(Output, Skipped, Display, Done, Failed, InputRequest, InputCancelled),
    *(Died, StoreDied, StoreUp, AgentFault, StartFailed, Stopped),
)


@dataclass
class _Flight:
    """A run that has not ended on all ranks, and those answers to it that a controller has
    acknowledged.
    """

    info: RunInfo
    waiting: set[int]
    answers: list[Parcel[Any]] = field(default_factory=list)


class Spool:
    """The agent's queue of ranks' messages that cannot be sent to a controller yet, and of the
    answers to unfinished runs, which the next controller receives again.

    Attributes:
        ahead: ranks that must not be read, as too many of their bytes wait.
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
        # Bytes by rank that wait here, except output.
        self._waiting: collections.Counter[int] = collections.Counter()
        self.ahead: set[int] = set()
        self._skipped: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._flights: dict[int, _Flight] = {}
        self._whole: set[int] = set()  # runs whose output is not dropped (`Relay.is_whole`)
        self._is_attended = False
        self.next_run = 1

    # ---- runs

    def begin(self, order: Relay) -> None:
        """Record a run that the controller sends to ranks, until it has ended on all of them."""
        if order.run < 0 or order.run >= _FIRST_OWN_RUN:
            return
        self.next_run = max(self.next_run, order.run + 1)
        if order.channel == "work":
            info = RunInfo(
                order.run, order.ranks, order.title, order.execution_count, order.interleaves
            )
            self._flights[order.run] = _Flight(info, set(order.ranks))
            if order.is_whole:
                self._whole.add(order.run)

    def forget_runs(self) -> None:
        """Drop the records of all runs, as all ranks are being restarted."""
        self._flights.clear()

    def runs(self) -> tuple[RunInfo, ...]:
        """Return the runs whose end on all ranks is not acknowledged yet, oldest first."""
        return tuple(flight.info for _, flight in sorted(self._flights.items()))

    def acked(self, parcels: Iterable[Parcel[Any]]) -> None:
        """Record that a controller has acknowledged these messages; runs that they end on all ranks
        are dropped.
        """
        for parcel in parcels:
            match parcel.verb:
                case Ranked(ranks, Done(run=run) | Failed(run=run)):
                    self._note_answer(run, ranks, parcel)
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
            self._entries[self._next_entry] = parcel
            if self._may_drop(parcel):
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
            num_bytes += size
            taken.append(parcel)
        return taken

    # ---- attaching and leaving controllers

    def leave(self, unacked: Iterable[Sequence[Parcel[Any]]]) -> None:
        """Record that the controller has left: queue the messages that it has not acknowledged
        again, within the memory limits that apply without a controller.
        """
        waiting = [*(parcel for message in unacked for parcel in message), *self._entries.values()]
        self._clear_entries()
        self._is_attended = False
        self.add(waiting)

    def attend(self, state: Parcel[Any], deaths: Sequence[Died]) -> None:
        """Queue, for a controller that attaches, the mesh's state, the deaths of ranks, and the
        answers kept for it.
        """
        dead = {died.rank for died in deaths}
        # The mesh's state includes ranks that died and have been replaced since.
        waiting = [
            p for p in self._entries.values() if type(p.verb) is not Died or p.verb.rank in dead
        ]
        to_come = {parcel.verb.rank for parcel in waiting if type(parcel.verb) is Died}
        before: list[Parcel[Any]] = []
        for _, flight in sorted(self._flights.items()):
            # Leave out deaths of ranks that have been replaced since; the mesh's state, which
            # follows, includes their successors.
            before += [
                each for each in flight.answers if getattr(each.verb, "rank", -1) not in dead
            ]
            flight.answers, flight.waiting = [], set(flight.info.ranks)
        told = [Parcel(died) for died in deaths if died.rank not in to_come]
        self._clear_entries()
        self._is_attended = True
        self.add([*before, state, *told, *waiting])

    # ---- internal

    def _may_drop(self, parcel: Parcel[Any]) -> bool:
        verb: Any = parcel.verb.verb if type(parcel.verb) is Ranked else None
        return type(verb) in _OUTPUT and not (self._is_attended and verb.run in self._whole)

    def _count(self, parcel: Parcel[Any], num_bytes: int) -> None:
        """Add a number of bytes, which may be negative, to the count of queued bytes of each rank
        that a message is from.
        """
        for rank in _givers(parcel):
            self._waiting[rank] += num_bytes
            if self._waiting[rank] > self._max_answer_bytes:
                self.ahead.add(rank)
            else:
                self.ahead.discard(rank)

    def _note_answer(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        flight = self._flights.get(run)
        if flight is None:
            return
        flight.waiting.difference_update(ranks)
        if flight.waiting:
            flight.answers.append(_lighten(parcel, COUNTED_BYTES))
        else:
            del self._flights[run]

    def _fit_for_others(self, parcel: Parcel[Any]) -> Parcel[Any] | None:
        """Return the part of a message that is kept for the next controller while none is attached;
        None to drop the message.
        """
        verb: Any = parcel.verb.verb if type(parcel.verb) is Ranked else parcel.verb
        if type(verb) not in _LASTING:
            return None
        if type(verb) not in (Done, Failed):
            return parcel
        if verb.run not in self._flights:  # an internal run of a controller that has left
            return None
        used = max((self._waiting[rank] for rank in _givers(parcel)), default=0)
        return _lighten(parcel, max(COUNTED_BYTES, self._max_answer_bytes - used))

    def _drop_oldest_output(self) -> None:
        parcel = self._entries.pop(self._output.popleft())
        size = size_of(parcel)
        self._output_bytes -= size
        verb = parcel.verb.verb
        if type(verb) is Bar:
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
        self._output_bytes = 0
        self._waiting.clear()
        self.ahead.clear()


class Visit:
    """Keeps the output of earlier runs, while a command controls the mesh for a moment, for the
    controller after it; the command receives all other messages.

    Args:
        first_run: number of the command's first run.
    """

    def __init__(self, first_run: int) -> None:
        self._first_run = first_run
        self._kept = Spool()

    def divide(self, parcels: Iterable[Parcel[Any]]) -> list[Parcel[Any]]:
        """Keep those of these messages that are for the next controller; return the others."""
        passed = []
        for parcel in parcels:
            verb: Any = parcel.verb.verb if type(parcel.verb) is Ranked else None
            is_earlier = type(verb) in _OF_RUN and verb.run < self._first_run
            if is_earlier and type(verb) is Failed and not verb.released:
                # The command resumes the ranks; the next controller need not, and shows this.
                text = Output(verb.run, "stderr", f"{verb.traceback.rstrip()}\n")
                self._kept.add([Parcel(Ranked(parcel.verb.ranks, text))])
            if is_earlier and type(verb) is not Failed:
                self._kept.add([parcel])
            else:
                passed.append(parcel)
        return passed

    def take(self) -> list[Parcel[Any]]:
        """Remove and return the kept messages."""
        return self._kept.take(MAX_OUTPUT_BYTES)


def size_of(parcel: Parcel[Any]) -> int:
    """Return the approximate memory of a message with its buffers, in bytes."""
    verb = parcel.verb.verb if type(parcel.verb) is Ranked else parcel.verb
    match verb:
        case Output():
            return len(verb.text) + len(verb.data)
        case Display():
            return len(verb.bundle)
        case Done() | Failed():
            traceback = len(verb.traceback) if isinstance(verb, Failed) else 0
            stream = len(verb.payload.stream) if verb.payload is not None else 0
            return _LEAST_BYTES + traceback + stream + sum(map(_num_bytes, parcel.buffers))
        case Routed():
            return _LEAST_BYTES + sum(map(len, parcel.buffers))
        case Logged():
            return _LEAST_BYTES + 16 * len(verb.steps) * len(verb.names)
    return _LEAST_BYTES


def _num_bytes(frame: Frame) -> int:
    return frame.num_bytes if isinstance(frame, SegmentFrame) else len(frame)


def _givers(parcel: Parcel[Any]) -> tuple[int, ...]:
    """Return the ranks that a message is from; () for a message of the agent itself."""
    return parcel.verb.ranks if type(parcel.verb) is Ranked else ()


def _lighten(parcel: Parcel[Any], max_bytes: int) -> Parcel[Any]:
    """Replace the value in a run's answer, if the answer is too large, by a stand-in that raises an
    error when it is loaded.
    """
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
