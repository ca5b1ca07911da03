"""Calls of other ranks that have arrived on this one, and reports on them for the controller, which
has not sent them: it counts those that last as work of this rank, can interrupt them, and releases
them from collectives that others do not join.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ...stdlib import os, time
from ...wire.codec import Parcel
from ...wire.handles import PeerCall
from ...wire.messages import Done
from ...wire.peer_calls import PEER_RUNS, PeerWork
from .peer_connections import Connection

# Numbers of runs are multiples of this, so that no answer waits for others (`Pump.answer`).
_STEP = 16
# How long a call executes at least before it is reported, and how often it is again, for a
# controller that has attached since.
_REPORT_S, _AGAIN_S = 0.05, 1.0
# How long to look out for calls after the last one.
_LINGER_S = 1.0
# How long calls wait, after one has failed or was cancelled, for the controller, which may not be
# attached.
_ALONE_S = 5.0


class PeerCalls:
    """The calls of other ranks that have arrived on a rank and have not ended.

    Args:
        context: the objects of the rank (`RankContext`).
    """

    def __init__(self, context: Any) -> None:
        self._context, self._interrupts = context, context.interrupts
        self._calls: dict[int, tuple[Connection, PeerCall]] = {}  # by run
        self._reported: set[int] = set()
        self._stop_at: dict[int, float] = {}  # of calls that the controller is to stop
        self._executes = (-1, 0.0)  # the run that was seen executing last, and since when
        self._report_at = self._go_on_at = self._seen_at = 0.0
        # Readable once the thread that looks (`look`) has to begin again.
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_watched = False

    def add(self, connection: Connection, call: PeerCall) -> int:
        """Record that a call has arrived; return the number of its run, the same on all ranks that
        are called together.
        """
        run = PEER_RUNS[_STEP * call.number % len(PEER_RUNS)]
        while run in self._calls:
            run += _STEP
        self._calls[run] = connection, call
        if not self._is_watched:
            os.eventfd_write(self.wake, 1)
        return run

    def find(self, run: int) -> tuple[Connection, PeerCall]:
        """Return the call of a run, and the connection on which it has arrived."""
        return self._calls[run]

    def cancel(self, connection: Connection, number: int | None = None) -> None:
        """Interrupt a call that has arrived on a connection, or all of them, wherever they are."""
        for run, (of, call) in [*self._calls.items()]:
            if of is connection and number in (None, call.link.run):
                work = self.serving()
                if work is not None and work.run == run and len(call.ranks) > 1:
                    # Else one rank could stop before a step, and another after it.
                    self._stop_at[run] = time.monotonic() + _ALONE_S
                    self._context.report(Parcel(msgspec.structs.replace(work, is_cancelled=True)))
                else:
                    self._context.stop(run)

    def divert(self, parcel: Parcel[Any]) -> Iterator[Parcel[Any]]:
        """Send the answer to a call, and yield its end for the controller: of a reported one, of
        one with collectives, and of one that has failed while other ranks may wait for this one.
        Yield a report of a call that has not ended.
        """
        verb = parcel.verb
        if type(verb) is PeerWork:
            if verb.run in self._calls:
                self._reported.add(verb.run)
                yield parcel
            return
        self._stop_at.pop(verb.run, None)
        connection, call = self._calls.pop(verb.run, (None, None))
        if connection is None or call is None:
            return
        connection.send(Parcel(msgspec.structs.replace(verb, run=call.link.run), parcel.buffers))
        is_reported = verb.run in self._reported
        self._reported.discard(verb.run)
        if type(verb) is Done:
            if is_reported or verb.counts:
                yield Parcel(Done(verb.run, counts=verb.counts))
        elif is_reported or len(call.ranks) > 1 or self._context.groups.ledger.touched:
            lean = {"payload": None, "traceback": "", "whole_traceback": ""}
            self._go_on_at = time.monotonic() + _ALONE_S
            self._context.tasks.awaits_heal = True
            yield Parcel(msgspec.structs.replace(verb, **lean))

    def serving(self) -> PeerWork | None:
        """Return the call that the main thread executes; None if there is none. Usable on any
        thread.
        """
        run, (seen, since) = self._interrupts.running, self._executes
        _, call = self._calls.get(run, (None, None))
        if call is None or run in self._interrupts.tasks:  # it waits beside other work
            return None
        age_s = round(time.monotonic() - since, 1) if seen == run else 0.0
        method = call.link.title.rpartition(" on ")[0]
        return PeerWork(run, f"{method} for {call.link.caller}", call.ranks, age_s)

    def look(self) -> float | None:
        """Report a call that executes for long, and return when to look again, in seconds; None if
        there are no calls. The path of a call is not here, so short ones cost nothing.
        """
        now, run = time.monotonic(), self._interrupts.running
        if self._calls:
            self._seen_at = now
        self._is_watched = now < self._seen_at + _LINGER_S
        if not (self._is_watched or self._calls):
            return None
        if self._context.tasks.awaits_heal and now >= self._go_on_at:
            self._context.tasks.go_on()
        for each in [each for each, at in [*self._stop_at.items()] if now >= at]:
            self._stop_at.pop(each, None)
            self._context.stop(each)
        if run != self._executes[0]:
            self._executes, self._report_at = (run, now), now + _REPORT_S
        elif now >= self._report_at and (work := self.serving()) is not None:
            self._report_at = now + _AGAIN_S
            self._context.report(Parcel(work))
        return _REPORT_S
