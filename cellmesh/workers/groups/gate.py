"""Pauses a rank before operations on process groups while the cell that it runs is being stopped.

All ranks of the run pause there, so that they end before the same operation, and operations that
one of them has begun are completed by the others (`controller.core.stopping` decides which ranks
proceed). DDP's reducer and FSDP's hooks begin their operations through the same methods, from C++
and perhaps on a thread of the autograd engine.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterable

from ...stdlib import threading, time
from ...wire.groups import GroupCount
from ...wire.peer_calls import PEER_RUNS
from ...wire.stopping import Owed, owes

_STEP_S = 0.02
# A rank that receives no more messages, as its controller has left, proceeds after this time.
_HEARD_WITHIN_S = 3.0
# How long operations of an optimizer's step may pass, so that the step is not left half done.
# Steps that contain training, as of LBFGS, pause after that.
_IN_STEP_S = 0.5


class Gate:
    """Pauses the main thread of a rank, and the autograd engine's threads, before operations on
    process groups while a cell is being stopped.

    Attributes:
        is_closed: whether operations have to pass `enter`. Read before each operation.
        is_paused: whether a thread waits in `enter`.
        running: returns the run that the main thread executes, -1 if none.
        is_pending: returns whether a run was signalled and its handler has not raised yet.
        counts: returns the numbers of operations begun on each group.
        num_steps: returns the number of steps of an optimizer, named as in `StepCount`.
        is_in_step: returns whether the operation that is about to begin belongs to an optimizer's
            step.
        report: sends a `StopState` of a run.
        on_raise: called before a paused run is ended.
    """

    def __init__(self, main_thread: int) -> None:
        self.is_closed = self.is_paused = False
        self.running: Callable[[], int] = lambda: -1
        self.is_pending: Callable[[int], bool] = lambda run: False
        self.counts: Callable[[], Iterable[GroupCount]] = tuple
        self.num_steps: Callable[[str], int] = lambda optimizer: 0
        self.is_in_step: Callable[[], bool] = lambda: False
        self.report: Callable[[int], None] = lambda run: None
        self.on_raise: Callable[[], None] = lambda: None
        self._main_thread = main_thread
        self._run = -1
        self._owed = Owed()
        self._until = self._closed_at = 0.0
        self._kind: type[KeyboardInterrupt] | None = None
        self._is_struck = False
        self._wakes = _thread.allocate_lock()

    # On the control thread.

    def close(self, run: int, owed: Owed) -> None:
        """Pause a run before each operation, except those in `owed`, for which other ranks already
        wait.
        """
        if run != self._run or not self.is_closed:
            self._kind, self._is_struck, self._owed = None, False, Owed()
            self._closed_at = time.monotonic()
        self._run, self._until = run, time.monotonic() + _HEARD_WITHIN_S
        self._owed = owed or self._owed
        self.is_closed = True
        if self.is_paused and self._goes_on():
            self.is_paused = False
            self._wake()

    def strike(self, run: int, kind: type[KeyboardInterrupt]) -> bool:
        """End a run: raise `kind` in the thread that this `Gate` has paused before an operation.

        Returns:
            Whether a thread is paused. If not, the caller signals the main thread, and an operation
            that it is about to begin waits for the signal's handler.
        """
        if not self.is_closed or run != self._run:
            return False
        if self.is_paused:
            self._kind = kind
            self._wake()
            return True
        self._is_struck = True
        return False

    def open(self) -> None:
        """Stop pausing threads: let them begin all operations on process groups."""
        self.is_closed, self._kind, self._is_struck = False, None, False
        self._owed = Owed()
        self._wake()

    def _wake(self) -> None:
        if self._wakes.locked():
            self._wakes.release()

    # On threads that begin operations.

    def enter(self, size: int) -> None:
        """While the gate is closed, pause this thread before an operation on a group of `size`
        ranks; raise if `strike` ends the run.
        """
        if size < 2 or not self.is_main():
            return
        try:
            while self.is_closed and not self._may_pass():
                if not self.is_paused and not self._is_struck:
                    self.is_paused = True
                    self.report(self._run)
                self._wakes.acquire(True, _STEP_S)
        finally:
            self.is_paused = False

    def _may_pass(self) -> bool:
        run = self.running()
        if run != self._run:
            if run > self._run or self._run in PEER_RUNS:
                self.open()  # a later run has begun
            return True
        if (kind := self._kind) is not None:
            self.open()  # user code that handles the interrupt may begin operations
            self.on_raise()
            raise kind
        if self._is_struck:
            if self.is_pending(run):
                return False
        elif self._goes_on() or self._completes_step():
            return True
        elif time.monotonic() < self._until:
            return False
        self.open()
        return True

    def _goes_on(self) -> bool:
        owed = self._owed
        if any(self.num_steps(optimizer) < number for optimizer, number in owed.steps):
            return True
        return bool(owed.counts) and owes(self.counts(), owed.counts)

    def _completes_step(self) -> bool:
        return self.is_in_step() and time.monotonic() - self._closed_at < _IN_STEP_S

    def note_begun(self) -> None:
        """Report that this rank has begun an operation while the gate is closed."""
        if self.is_main() and self.running() == self._run:
            self.report(self._run)

    def is_main(self) -> bool:
        """Return whether this thread is the main one, or executes a backward pass for it."""
        # The engine's threads, which are not in `threading`, run backward for the main thread.
        ident = threading.get_ident()
        return ident == self._main_thread or ident not in threading._active  # type: ignore[attr-defined]
