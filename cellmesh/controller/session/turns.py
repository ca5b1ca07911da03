"""Decides which thread runs the link's loop: one that waits for a run, so that no answer crosses a
thread, or the link's own.

A thread that has waited keeps the loop for some milliseconds, in which its next wait is likely to
begin. Descriptors are polled without a lock, by the thread that has the loop; what they belong to
is used under `turn`, and left with nothing to read: ZeroMQ's descriptor tells of what comes after
that only.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections.abc import Callable, Iterable

from ...errors import MeshUsageError
from ...stdlib import threading, time
from ...wire.held_signals import HeldSignals

# For how long the loop stays with a thread that has waited.
_STAY_S = 0.005
# How often a thread that waits for its turn looks whether the stop button was pressed.
_PATIENCE_S = 0.1


class Turns:
    """Gives the link's loop to one thread at a time.

    Args:
        step: does what is to be done, until nothing is left to read; returns when it must be
            called again at the latest, by `time.monotonic`. Called with `turn` held.
        is_over: whether the loop is to end.
        note_ready: told of a descriptor that is ready; whether it is to be polled on.

    Attributes:
        turn: held by the thread that uses what the loop uses.
        signals: held back while the main thread must not be interrupted.
        pid: the process that has the loop.
        inside: the thread that is within a step of the loop, where callbacks are called; 0 if none
            is.
    """

    def __init__(
        self,
        step: Callable[[], float],
        is_over: Callable[[], bool],
        note_ready: Callable[[int], bool],
    ) -> None:
        self._step, self._is_over, self._note_ready = step, is_over, note_ready
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock, self.turn = threading.Lock(), threading.Lock()
        self.signals = HeldSignals(self.rouse)
        self._polls: tuple[select.poll, select.poll] | None = (
            None  # of a waiter and of the loop's own thread
        )
        self.pid = os.getpid()
        self.inside = 0
        self._is_taken = False  # a thread that waits has the loop
        self._left_at = -math.inf
        self._num_waits = 0
        self._beside: set[int] = set()  # threads that wait while another has the loop
        self._is_parked = self._sleeps = False  # the loop's own thread, as another has it
        self._go_on = threading.Event()

    # ---- from any thread

    def serve(self, has_news: Callable[[], bool], until: float, wait: Callable[[], object]) -> None:
        """Run the loop on the calling thread until there is news, `until`, or a signal arrives.

        Args:
            has_news: whether what is waited for may have come.
            until: when, by `time.monotonic`.
            wait: waits for news, and no longer than that, where another thread has the loop.

        Raises:
            MeshUsageError: this is a process forked from the one that has the loop, or a callback
                in it.
        """
        if os.getpid() != self.pid:
            raise forked_from(self.pid)
        if threading.get_ident() == self.inside:
            self.check_may_wait()
        if self._polls is not None:
            with self.signals:
                with self._lock:
                    may_serve = not (self._is_taken or self._is_over())
                    if may_serve:
                        self._is_taken = True
                        self._num_waits += 1
                if may_serve:
                    try:
                        if not self._is_parked:
                            self.rouse()  # the loop's own thread leaves its poll
                        self._serve_here(self._polls[0], has_news, until)
                    finally:
                        self._leave()
                    return
        try:
            self._beside.add(threading.get_ident())
            wait()
        finally:
            self._beside.discard(threading.get_ident())

    def check_may_wait(self) -> None:
        """Raise an error if the loop has called the caller, which would wait for the loop itself.

        Raises:
            MeshUsageError: the caller is called by the loop.
        """
        if threading.get_ident() == self.inside:
            raise MeshUsageError(
                "a callback (`Run.on_end`) cannot wait for ranks: it is called where their "
                "answers arrive, and none would. `submit` there and give that run a callback, or "
                "wait on another thread"
            )

    def rouse(self) -> None:
        """Wake the thread that runs the loop and polls its sockets."""
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:  # the loop has ended
            return

    def hand_over(self) -> None:
        """Give the loop back to the link's own thread, unless a waiting thread is running it.

        Raises:
            MeshUsageError: this is a process forked from the one that has the loop.
        """
        if os.getpid() != self.pid:
            raise forked_from(self.pid)
        if self._is_parked and not self._is_taken:
            self._left_at = -math.inf
            self._go_on.set()

    def call_off(self) -> None:
        """Wake every thread that runs the loop or waits for its turn, as the loop has ended."""
        self.rouse()
        self._go_on.set()

    # ---- on the loop's own thread

    def run(self, descriptors: Iterable[int]) -> None:
        """Run the loop whenever no other thread does, until its end, and until no thread is left in
        it.
        """
        numbers = (*descriptors, self._wake)
        polls = select.poll(), select.poll()
        for poll in polls:
            for number in numbers:
                poll.register(number, select.POLLIN)
        self._polls = polls
        while not self._is_over():
            if self._may_go_on():
                with self.turn:
                    due = self._step()
                if not (self._is_taken or self._is_over()):
                    self._poll(polls[1], due)
        with self._lock:  # who asks from here on sees that it is over
            self._polls = None
        self.rouse()
        while self._is_taken:
            self._go_on.wait(_STAY_S)
            self._go_on.clear()

    def close(self) -> None:
        """Close the loop's own descriptors, after its end."""
        wake, self._wake = self._wake, -1
        os.close(wake)

    # ---- inside

    def _may_go_on(self) -> bool:
        """Return whether the link's thread may run the loop; if another thread runs it, first wait
        for that thread.
        """
        with self._lock:
            is_free = not self._is_taken and time.monotonic() >= self._left_at + _STAY_S
            self._is_parked = not is_free
            seen = self._num_waits
        if is_free:
            return True
        self._go_on.wait(_STAY_S)
        if self._is_taken and seen == self._num_waits:  # that wait takes long
            self._sleeps = True
            if self._is_taken and not self._is_over():
                self._go_on.wait()
            self._sleeps = False
        self._go_on.clear()
        return False

    def _serve_here(self, poll: select.poll, has_news: Callable[[], bool], until: float) -> None:
        while True:
            while not self.turn.acquire(timeout=_PATIENCE_S):
                if self.signals.has_noted:  # the loop's own thread is still showing something
                    return
            try:
                due = self._step()
            finally:
                self.turn.release()
            if has_news() or self.signals.has_noted or self._is_over():
                return
            if time.monotonic() >= until:
                return
            self._poll(poll, min(due, until))

    def _leave(self) -> None:
        self._left_at = time.monotonic()
        self._is_taken = False
        if self._beside or self._is_over():
            self._left_at = -math.inf
            self._go_on.set()
        elif self._sleeps:
            self._go_on.set()

    def _poll(self, poll: select.poll, until: float) -> None:
        """Poll the loop's descriptors until one is ready, or until a time by `time.monotonic`."""
        left_s = until - time.monotonic()
        for number, _ in poll.poll(None if left_s == math.inf else max(0, int(left_s * 1000 + 1))):
            if number == self._wake:
                with contextlib.suppress(BlockingIOError):  # another thread has read it
                    os.eventfd_read(number)
            elif not self._note_ready(number):
                poll.unregister(number)


def forked_from(pid: int) -> MeshUsageError:
    """Return the error of using the loop in a process forked from the one that has it."""
    return MeshUsageError(
        f"this process ({os.getpid()}) was forked from the one that holds the mesh ({pid}), and "
        "cannot use it: call the mesh there, or in another process that has left it to itself "
        "(`mesh.detach()`), with cellmesh.attach()"
    )
