"""Interrupts one given run of a rank, and no other, by raising a KeyboardInterrupt (or its subclass
`Released`) in the main thread.

SIGINT alone does not identify a run, as it may arrive between two runs. So the control thread
records the run first, then sends the signal; the handler raises only while that run executes. A run
that is still queued is cancelled by its number.

As user code may handle, ignore or block SIGINT, `Interrupts.insist` sends another signal.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

from ...stdlib import os, signal, threading, time
from ...wire.limits import MAX_RUNS
from ..linux_process import ignore_from_any_thread
from ..static_lookup import module_of
from .stack_inspection import is_of_library

# Maximum number of recorded interrupts of runs that have not arrived; as many may arrive at once.
_MAX_CANCELLED = MAX_RUNS + 1000
# A real-time signal from the middle of the range: libc, debuggers and profilers use both ends.
_OWN_SIGNAL = signal.SIGRTMIN + 11
_SIGINT = int(signal.SIGINT)
# How long the import of a library may continue before it is interrupted.
_IMPORT_S = 10.0
# torch's modules of context managers that change a thread's modes. A signal that struck there would
# leave the mode on: gradients would be off for the rest of the process. None of these functions
# waits or calls user code.
_MODES = tuple(
    f"/torch/{each}.py"
    for each in ("autograd/grad_mode", "amp/autocast_mode", "overrides", "utils/_python_dispatch")
)
# An interrupt that left a task's step, and not its coroutine, would end the task without an answer.
_OF_STEPS = (
    "/rank/tasks.py _step", "/rank/interrupts.py enter", "/rank/interrupts.py leave",
    "/rank/peer_connections.py send",
)  # fmt: skip
# Modules with the functions that an import passes.
_OF_IMPORTS = ("importlib", "_frozen_importlib", "cellmesh.")
_CHANGES_MODE = ("__init__", "__enter__", "__exit__")
# Like `signal.getsignal`, but without its conversion to enums, which takes five Python calls.
_getsignal: Callable[[int], object] = importlib.import_module("_signal").getsignal


class DescriptionTimeout(KeyboardInterrupt):
    """Raised in an exception's own code when describing the exception takes too long."""


@dataclass
class Cancellable:
    """A run that executes as an asyncio task.

    Attributes:
        cancel: cancels the task; usable on the main thread, also in signal handlers.
        schedule: calls a function in the event loop; usable on any thread.
        interleaves: whether it waits beside other work of the rank.
        kind: exception class by which it was stopped while it waited; None if it was not.
    """

    cancel: Callable[[], object]
    schedule: Callable[[Callable[[], object]], object]
    interleaves: bool = False
    kind: type[KeyboardInterrupt] | None = None


class Interrupts:
    """Records which run the main thread executes and which run to interrupt, and handles SIGINT on
    the main thread.
    """

    def __init__(self) -> None:
        self.running = -1  # number of the run that executes
        self.num_begun = 0
        self.tasks: dict[int, Cancellable] = {}  # runs that have begun, and execute as tasks
        self._is_suspended = False  # whether `running` is such a run, and waits in the event loop
        self._wanted = -1
        self._kind: type[KeyboardInterrupt] = KeyboardInterrupt
        self._cancelled: dict[int, type[KeyboardInterrupt]] = {}
        self._shields = 0
        self._held_back = False
        self._pid = os.getpid()
        self.is_describing = False  # whether the failed run's exception is being described
        self._imports_since: float | None = None  # when waiting for a library's import began
        # Called with a run and the exception to raise in it a moment later: Python has dropped the
        # exception in a finalizer, or it must not cut an import in half.
        self.on_dropped: Callable[[int, type[KeyboardInterrupt]], None] = lambda run, kind: None
        # Called with a failed run, before its exception is described.
        self.on_failure: Callable[[int], None] = lambda run: None
        self._handler = self._on_signal
        self._main = threading.main_thread().ident

    def install(self) -> None:
        """Install this object's handler of SIGINT; call it on the main thread."""
        self._handle_signals()
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    def begin(self, run: int) -> None:
        """Record that the main thread starts a run; raise a KeyboardInterrupt if the run was
        interrupted before it began.
        """
        if _getsignal(_SIGINT) is not self._handler:
            self._handle_signals()  # code of an earlier run has replaced the handler
        self._held_back, self._imports_since = False, None
        # In this order, and in the opposite one in `request`, so that at least one of the two sees
        # the other's change.
        self.running = run
        self.num_begun += 1
        kind = self._cancelled.pop(run, None) if self._cancelled else None
        if kind is not None:
            self.running = -1
            raise kind

    def wait_in(self, run: int, is_over: bool = False) -> None:
        """Record that the main thread enters its event loop in a run (-1: in none); `is_over`: that
        it has left the loop.
        """
        if _getsignal(_SIGINT) is not self._handler and run < 0 and not is_over:
            self._handle_signals()
        self._is_suspended = not is_over
        self.running = run

    def enter(self, run: int) -> tuple[bool, int]:
        """Record that a task of a run continues; return the state to give to `leave`."""
        before = self._is_suspended, self.running
        self.running = run
        self._is_suspended = False
        self.num_begun += 1
        # As in `begin`. Its task is cancelled when it waits next, or struck if it computes.
        if self._cancelled and run in self.tasks and (kind := self._deliver(run)):
            self.on_dropped(run, kind)
        return before

    def leave(self, before: tuple[bool, int]) -> None:
        """Record that a task waits or has ended."""
        self._is_suspended, self.running = before  # in this order, or an interrupt could strike

    def _deliver(self, run: int) -> type[KeyboardInterrupt] | None:
        """Cancel the task of a run whose interrupt was recorded; return the exception's class."""
        kind = self._cancelled.pop(run, None)
        if kind is not None:
            self.cancel(run, kind)
        return kind

    def cancel(self, run: int, kind: type[KeyboardInterrupt]) -> None:
        """Cancel the task of a run that was stopped by this class of exception."""
        if (task := self.tasks.get(run)) is not None:
            task.kind = kind
            task.cancel()

    def takes_back(self, run: int) -> bool:
        """Return whether the user has interrupted a run before it began, and drop the interrupt."""
        if self._cancelled.get(run) is not KeyboardInterrupt:
            return False
        return self._cancelled.pop(run, None) is not None

    def end(self) -> None:
        """Record that the main thread has ended its run; after a success, setting `running` to -1
        suffices.
        """
        self.running = self._wanted = -1
        self._held_back = self.is_describing = False

    def _handle_signals(self) -> None:
        for number in (signal.SIGINT, _OWN_SIGNAL):
            signal.signal(number, self._handler)

    def describe(self, run: int) -> None:
        """Record that the exception of a failed run is being rendered; during that, only
        `Interrupts.insist` interrupts the main thread.
        """
        self.running, self.is_describing = run, True
        self.on_failure(run)

    def limit_description(self, run: int) -> bool:
        """Let `Interrupts.insist` interrupt the rendering of a run's exception; return whether the
        rendering still goes on.
        """
        if self.running != run or not self.is_describing:
            return False
        self._kind, self._wanted = DescriptionTimeout, run
        return True

    def request(self, run: int, kind: type[KeyboardInterrupt] = KeyboardInterrupt) -> bool:
        """Interrupt a run, from another thread, by a KeyboardInterrupt, or by `Released` if the
        user did not ask for it; return whether the run is executing. If it has not begun, it will
        not start.
        """
        if self.running != run:
            self._cancelled[run] = kind
            while len(self._cancelled) > _MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
            # If the run has begun, and missed the entry, no thread would look at the entry again.
            if self.running != run or self._cancelled.pop(run, None) is None:
                if (task := self.tasks.get(run)) is not None:  # it waits, or is about to go on
                    task.schedule(lambda: self._deliver(run))
                return False
        self._kind = kind
        self._wanted = run
        assert self._main is not None
        # SIG_DFL: user code wants SIGINT to end the process.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            ignore_from_any_thread(signal.SIGINT)  # until the next run begins
            self.insist(run)
        else:
            signal.pthread_kill(self._main, signal.SIGINT)
        return True

    def insist(self, run: int) -> None:
        """Interrupt a run that has not reacted to `Interrupts.request`, however user code handles
        or blocks SIGINT.
        """
        if self.is_pending(run) and self._main is not None:
            signal.pthread_kill(self._main, _OWN_SIGNAL)
            signal.raise_signal(_OWN_SIGNAL)  # here: the main thread may block signals

    def is_handled_by_user(self) -> bool:
        """Return whether user code has installed its own function as handler of SIGINT."""
        handler = signal.getsignal(signal.SIGINT)
        return callable(handler) and handler not in (self._handler, signal.default_int_handler)

    def is_pending(self, run: int) -> bool:
        """Return whether an interrupt of this run was requested that the main thread has not
        handled yet.
        """
        return self._wanted == run == self.running

    def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
        # A process that user code has forked is stopped with the cell that waits for it.
        if os.getpid() != self._pid:
            # Except daemons, such as a DataLoader's workers.
            if not multiprocessing.current_process().daemon:
                signal.default_int_handler(signum, frame)
            return
        wanted = self._wanted
        if wanted in self.tasks and (self._is_suspended or self.running != wanted):
            self._wanted = -1
            self.cancel(wanted, self._kind)  # none of its tasks executes
            return
        is_late = self.is_describing and signum != _OWN_SIGNAL
        if is_late or not 0 <= self.running == wanted or frame is None:
            return
        importing, code = None, frame.f_code
        is_in_mode = f"{code.co_filename} {code.co_name}".endswith(_OF_STEPS)
        while frame is not None:
            code = frame.f_code
            if code is Interrupts.end.__code__:
                return  # the run is over, and `end` must complete
            importing = frame if _imports_library(frame) else importing
            is_in_mode |= code.co_name in _CHANGES_MODE and code.co_filename.endswith(_MODES)
            frame = frame.f_back
        if self._shields:
            self._held_back = True
            return
        if is_in_mode or (importing is not None and self._may_import()):
            self._wanted = -1
            if importing is not None:
                self._raise_after(importing, self.running, self._kind)
            self.on_dropped(self.running, self._kind)
            return
        if not self.is_describing:  # a description makes several attempts, each of which may hang
            self._wanted = -1
        raise self._kind

    def _raise_after(
        self, imported: types.FrameType, run: int, kind: type[KeyboardInterrupt]
    ) -> None:
        """Raise an exception in a run as soon as the import of a library has ended: at the same
        point on all ranks, which later may have made different numbers of steps.

        Args:
            imported: the outermost frame that executes the top level of a library's module.
        """
        frame = imported.f_back
        while frame is not None and module_of(frame).startswith(_OF_IMPORTS):
            frame = frame.f_back
        if frame is None or sys.gettrace() is not None:  # a debugger's
            return  # the interrupt is repeated in any case
        caller = frame

        def trace(frame: types.FrameType, event: str, argument: object) -> None:
            if self.running != run or frame is caller:
                sys.settrace(None)
            if self.running == run and frame is caller:
                raise kind

        caller.f_trace, caller.f_trace_opcodes = trace, True
        sys.settrace(trace)

    def _may_import(self) -> bool:
        """Return whether the import of a library, during which an interrupt arrived, may go on for
        now.
        """
        now = time.monotonic()
        self._imports_since = since = self._imports_since or now
        return now - since < _IMPORT_S

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that Python has discarded because it was raised in a finalizer or
        fork hook.

        Another thread repeats it a moment later, as Python also drops exceptions of this hook.
        """
        kind = unraisable.exc_type
        if issubclass(kind, KeyboardInterrupt) and self.running >= 0:
            self.on_dropped(self.running, kind)
        else:
            self._report_unraisable(unraisable)

    # A context manager for the few lines of cellmesh's code that user code calls and that an
    # interrupt must not cut.
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


def _imports_library(frame: types.FrameType) -> bool:
    """Return whether a frame executes the top level of a library's module, as part of an import.

    When an import is cut, Python drops the package but not its submodules: a second ``import
    torch._dynamo``, as in DDP, raises AttributeErrors for the rest of the process.
    """
    caller = frame.f_back
    return (
        frame.f_code.co_name == "<module>"
        and is_of_library(frame.f_code.co_filename)
        and caller is not None
        and caller.f_code.co_filename.startswith("<frozen importlib")
    )
