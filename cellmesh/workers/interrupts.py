"""Stop one run, and only that run, with a KeyboardInterrupt (or `Released`) in the main thread.

SIGINT alone cannot say whom it means: it may arrive between two runs. So the control thread names the run
first, then signals; the handler raises only while that very run executes. A run that is still queued is
cancelled by its number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import types

# Answers to interrupts of runs that never come are forgotten beyond this.
_MAX_CANCELLED = 1000
_AGAIN_S = 0.01


class Interrupts:
    """Who is to be interrupted. `begin`, `end` and the handler belong to the main thread."""

    def __init__(self) -> None:
        self.running = -1
        self.num_begun = 0  # runs so far
        self._wanted = -1
        self._kind: type[KeyboardInterrupt] = KeyboardInterrupt
        self._cancelled: dict[int, type[KeyboardInterrupt]] = {}
        self._shields = 0
        self._held_back = False
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._report_unraisable = sys.unraisablehook

    def install(self) -> None:
        """Take over SIGINT; call it on the main thread."""
        signal.signal(signal.SIGINT, self._on_signal)
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    def begin(self, run: int) -> None:
        """The main thread starts a run.

        Raises:
            KeyboardInterrupt: the run was interrupted while it waited.
        """
        if signal.getsignal(signal.SIGINT) != self._on_signal:
            signal.signal(
                signal.SIGINT, self._on_signal
            )  # an earlier run's code has put another in its place
        # In this order, and the other way round in `request`: one of the two sees what the other has done.
        self.running = run
        self.num_begun += 1
        kind = self._cancelled.pop(run, None)
        if kind is not None:
            self.running = -1
            raise kind

    def end(self) -> None:
        """The main thread is done with its run."""
        self.running = self._wanted = -1
        self._held_back = False

    def request(self, run: int, kind: type[KeyboardInterrupt] = KeyboardInterrupt) -> bool:
        """Interrupt a run, from any other thread.

        Args:
            run: its number.
            kind: what is raised in it: KeyboardInterrupt, or `Released` where the user did not ask for it.

        Returns:
            Whether it is running now; if not, it will not start.
        """
        if self.running != run:
            self._cancelled[run] = kind
            while len(self._cancelled) > _MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
            # Had it begun, and looked for this, in between, nobody would look again.
            if self.running != run or self._cancelled.pop(run, None) is None:
                return False
        self._kind = kind
        self._wanted = run
        assert self._main is not None
        signal.pthread_kill(self._main, signal.SIGINT)
        return True

    def is_pending(self, run: int) -> bool:
        """Whether a run has been asked to end and the main thread has not seen it yet."""
        return self._wanted == run

    def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._pid:  # forked by user code, and stopped with the cell that waits for it
            if not multiprocessing.current_process().daemon:  # as a DataLoader's worker is, which lives on
                signal.default_int_handler(signum, frame)
            return
        if self.running < 0 or self.running != self._wanted:
            return
        while frame is not None:
            if frame.f_code is Interrupts.end.__code__:
                return  # the run is over, and its end must be noted
            frame = frame.f_back
        if self._shields:
            self._held_back = True
            return
        self._wanted = -1
        raise self._kind

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """An interrupt that struck in a finalizer or a fork hook was dropped by Python: try again.

        From beside, and a moment later: what is raised in this hook is dropped, too.
        """
        kind = unraisable.exc_type
        if issubclass(kind, KeyboardInterrupt) and self.running >= 0:
            threading.Timer(_AGAIN_S, self._request_again, [self.running, kind]).start()
        else:
            self._report_unraisable(unraisable)

    def _request_again(self, run: int, kind: type[KeyboardInterrupt]) -> None:
        if self.running == run:
            self.request(run, kind)

    # A context manager for the few lines of ours that user code calls and that must not be cut in half.
    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._shields += 1

    def __exit__(self, *exc: object) -> None:
        if threading.get_ident() == self._main:
            self._shields -= 1
            if self._held_back and not self._shields:
                self._held_back = False
                self._wanted = -1
                raise self._kind
