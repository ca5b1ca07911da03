"""Tracks the progress bars of a rank, of any library, and decides which numbers are sent when.

Bars change as often as their own rules let them (tqdm's `mininterval`); a rank sends the numbers of
its bars ten times a second at most. A bar's first numbers are sent at once, as long as bars are not
opened in floods, as they mark the bar's place among what is printed.
"""

from __future__ import annotations

import collections
import dis
import itertools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...stdlib import os, threading, time
from ...wire.codec import Parcel
from ...wire.progress import Bar, BarState
from ..linux_process import start_thread
from ..static_lookup import chain_of, module_of, traceback_of

GATHER_S = 0.1
# So many bars are opened at once, and so many a second, without having to wait for the others.
_MAX_OPENINGS = 20.0
_OPENINGS_PER_S = 5.0
# Of bars that came and went between two messages, so many are shown.
_MAX_PASSED = 10
_MAX_TEXT = 200
_MAX_LEFT = 100
# What stands between user code and the end of its bar.
_MACHINERY = ("tqdm", "rich", "cellmesh", "contextlib")

# A frame and the instruction in it, as (identity, offset); any instruction with -1.
Spot = tuple[int, int]


@dataclass
class Meter:
    """One progress bar on this rank: how to read its numbers, and by which run and thread it was
    begun.

    Attributes:
        read: its numbers now, as a `Bar` without number and run; None once it is gone.
        run, number, num_outer: see `Bar`.
        thread: whose it is.
        owner: who shows it beside others of its own; None for one by itself.
    """

    read: Callable[[], Bar | None]
    run: int
    number: int
    num_outer: int
    thread: int
    owner: object = None
    state: BarState = "open"
    reading: Bar = field(default_factory=lambda: Bar(0, 0, "", 0.0, 0.0, 0.0))
    was_sent: bool = False


class Meters:
    """The progress bars of one rank; usable on any thread.

    Args:
        send: sends a message, after what has been printed before it.
        current_run: the run that the caller belongs to.
        shield: entered around what an interrupt must not cut in half.
        clock: seconds.

    Attributes:
        has_news: a bar is open, or has changed since the last run ended.
    """

    def __init__(
        self,
        send: Callable[[Parcel[Any]], None],
        current_run: Callable[[], int],
        shield: AbstractContextManager[Any, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._current_run = current_run
        self._shield = shield or nullcontext()
        self._clock = clock
        self._pid = os.getpid()
        self.has_news = False
        # Reentrant: the collector may end a bar while another is looked at.
        self._lock = threading.RLock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Meter] = {}
        self._changed: dict[int, Meter] = {}
        self._left: collections.deque[tuple[Spot, Meter]] = collections.deque(maxlen=_MAX_LEFT)
        self._sent_at = -GATHER_S
        self._num_openings = _MAX_OPENINGS
        self._opened_at = 0.0
        self._due = threading.Event()
        self._thread = 0

    @property
    def is_usable(self) -> bool:
        """Whether bars of this process report their numbers: not in one that user code forked."""
        return os.getpid() == self._pid

    def open(
        self, read: Callable[[], Bar | None], owner: object = None, thread: int | None = None
    ) -> Meter:
        """Note that a bar begins; it is shown after its first `changed`.

        `read` is called on any thread. Bars of one `owner` stand beside each other and are not
        nested. The bar belongs to the calling thread, or to `thread`.
        """
        thread = thread or threading.get_ident()
        with self._shield, self._lock:
            others = [
                meter
                for meter in self._open.values()
                if meter.owner is None or meter.owner is not owner
            ]
            num_outer = sum(meter.thread == thread for meter in others)
            meter = Meter(read, self._current_run(), next(self._numbers), num_outer, thread, owner)
            self._open[meter.number] = meter
            self.has_news = True
        return meter

    def changed(self, meter: Meter) -> None:
        """Note that a bar's numbers have changed."""
        now = self._clock()
        with self._shield:
            reading = None if meter.state == "open" else _read(meter)
            goes_on = reading is not None and reading.done != meter.reading.done
            with self._lock:
                if meter.state != "open":
                    if not goes_on:
                        return
                    self._reopen(meter)
                self._changed[meter.number] = meter
                self.has_news = True
                is_due = now - self._sent_at >= GATHER_S or (
                    not meter.was_sent and self._may_open(now)
                )
            self._send_or_wait(is_due)

    def close(self, meter: Meter, state: BarState, spot: Spot | None = None) -> None:
        """Note that a bar has ended, and in which state.

        `spot` is where it was left before it was full: if its run ends with an exception from
        there, it has failed.
        """
        with self._shield:
            self._look_at(meter)
            with self._lock:
                if meter.state != "open":
                    return
                meter.state = state
                meter.read = lambda: None
                self._open.pop(meter.number, None)
                if spot is not None:
                    self._left.append((spot, meter))
                self._changed[meter.number] = meter
                self.has_news = True
                is_due = self._clock() - self._sent_at >= GATHER_S
            self._send_or_wait(is_due)

    def end_run(self, run: int, error: BaseException | None) -> None:
        """Send the last numbers of a run's bars; those that `error` has ended have failed. Called
        on the main thread.
        """
        self.has_news = False
        for meter in list(self._open.values()):
            if meter.run == run:
                self._look_at(meter)
        with self._lock:
            left, self._left = self._left, collections.deque(maxlen=_MAX_LEFT)
            mine = [meter for meter in self._open.values() if meter.run == run]
            if error is not None:
                state: BarState = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                spots = spots_of(error) if left else set()
                for spot, meter in left:
                    if spot in spots and meter.state == "done":
                        meter.state = state
                        self._changed[meter.number] = meter
                for meter in mine:
                    if meter.thread == threading.get_ident():
                        meter.state = state
                        del self._open[meter.number]
            self._changed.update((meter.number, meter) for meter in mine)
            self.has_news |= bool(self._open)
        self.flush(waits=True)

    def flush(self, waits: bool = False) -> None:
        """Send the bars that have changed, on one thread at a time, so that bars arrive in the
        order of their begin.

        Where `waits`, return once all is sent, also what another thread is sending.
        """
        with self._shield:
            while self._changed and self._sending.acquire(blocking=waits):
                try:
                    # Not under the lock: what is sent takes another, under which the collector may
                    # end a bar.
                    for bar in self._take():
                        self._send(Parcel(bar))
                finally:
                    self._sending.release()
            if waits:
                with self._sending:
                    pass

    # ---- inside

    def _may_open(self, now: float) -> bool:
        refill = (now - self._opened_at) * _OPENINGS_PER_S
        self._num_openings = min(_MAX_OPENINGS, self._num_openings + refill)
        self._opened_at = now
        if self._num_openings < 1:
            return False
        self._num_openings -= 1
        return True

    def _reopen(self, meter: Meter) -> None:
        """Give a bar that continues in another run a new number, as a bar of that run."""
        meter.number, meter.run, meter.state = next(self._numbers), self._current_run(), "open"
        meter.was_sent = False
        self._open[meter.number] = meter

    def _send_or_wait(self, is_due: bool) -> None:
        if is_due:
            self.flush()
        elif self.is_usable:
            if not self._thread:
                self._thread = start_thread(self._send_gathered)
            self._due.set()

    def _send_gathered(self) -> None:
        while True:
            self._due.wait()
            time.sleep(max(0.0, self._sent_at + GATHER_S - self._clock()))
            self._due.clear()
            self.flush()

    def _look_at(self, meter: Meter) -> None:
        """Read a bar's numbers, not under the lock: reading takes locks of others, under which the
        garbage collector may end a bar.
        """
        reading = _read(meter)
        with self._lock:
            if reading is not None and meter.state == "open":
                meter.reading = reading

    def _take(self) -> list[Bar]:
        with self._lock:
            changed, self._changed = list(self._changed.values()), {}
            self._sent_at = self._clock()
            passed = [meter for meter in changed if meter.state != "open" and not meter.was_sent]
            unseen = {id(meter) for meter in passed[:-_MAX_PASSED]}
            unseen |= {id(meter) for meter in passed if meter.state == "removed"}
        seen = [meter for meter in changed if id(meter) not in unseen]
        for meter in seen:
            self._look_at(meter)
        with self._lock:
            for meter in seen:
                meter.was_sent = True
            return [_as_sent(meter) for meter in seen]


def _read(meter: Meter) -> Bar | None:
    try:
        return meter.read()
    except Exception:  # a bar of the user's own class, say: what it said last stands
        return None


def _as_sent(meter: Meter) -> Bar:
    reading = meter.reading
    return msgspec.structs.replace(
        reading,
        run=meter.run,
        bar=meter.number,
        title=_text(reading.title),
        unit=_text(reading.unit),
        note=_text(reading.note),
        state=meter.state,
        num_outer=meter.num_outer,
    )


def _text(text: str) -> str:
    """Return a bar's text cut to the limit, without lone surrogates, which cannot be sent."""
    return text[:_MAX_TEXT].encode(errors="replace").decode()


def spot_outside() -> Spot | None:
    """Return the place at which user code has left a loop before its bar was full: at a ``break``,
    or an exception that is being raised.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(module_of(frame)):
        frame = frame.f_back
    at = frame.f_lasti
    if at < 0:
        return None
    # After a ``finally`` the exception goes on from another instruction than the one that raised
    # it.
    is_again = dis.opname[frame.f_code.co_code[at]] == "RERAISE"
    return id(frame), -1 if is_again else at


def spots_of(error: BaseException) -> set[Spot]:
    """Return the places in user code that an exception, or one that caused it, has passed."""
    spots: set[Spot] = set()
    for each in chain_of(error):
        tb = traceback_of(each)
        while tb is not None:
            spots |= {(id(tb.tb_frame), tb.tb_lasti), (id(tb.tb_frame), -1)}
            tb = tb.tb_next
    return spots


def _is_machinery(name: str) -> bool:
    return name.partition(".")[0] in _MACHINERY
