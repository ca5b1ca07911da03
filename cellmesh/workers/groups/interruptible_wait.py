"""Waits for C++ calls and for gloo's operations such that signals and releases end the waits."""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
from _queue import SimpleQueue
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work
from torch.futures import Future

from ...errors import GroupDown
from ...stdlib import time
from ..linux_process import start_thread
from ..trace.recorder import Spans
from .store import StoreWaits

_STEP_S = 0.02
# One look at a collective; the end of a collective is seen at once.
_LOOK = timedelta(seconds=0.1)
# How long operations that were cut may take to notice.
_GRACE_S = 0.5
NO_TIMEOUT = timedelta(0)
_LEFT = "the wait for other ranks was ended: they do not take part any more"


@dataclass(frozen=True, eq=False)
class _Guarded:
    """The future `gate`, whose completion ends a wait of C++ for a collective, and the number of
    `Patience.end` calls made before it was created.
    """

    gate: Future[None]
    num_ends: int

    def open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open
            self.gate.set_result(None)


class Patience:
    """Waits for C++ calls and gloo collectives of a rank in a way that signals can interrupt and
    `end`, called on any thread, can end.
    """

    def __init__(self, waits: StoreWaits) -> None:
        self._waits = waits
        self._num_ends = 0
        self._num_waiting = 0
        self._guarded: set[_Guarded] = set()
        self._keeps_types = False
        self._idle: list[_Helper] = []
        self.has_left = False  # whether a collective was left behind that had not ended

    def end(self) -> int:
        """End every `run`, and complete the futures of `guard` that were already pending at the
        previous call of `end`; return how many waits this ends.
        """
        self._num_ends += 1
        left = [one for one in self._guarded.copy() if one.num_ends < self._num_ends - 1]
        for one in left:
            self.has_left = True
            self._guarded.discard(one)
            one.open()
        return self._num_waiting + len(left)

    def keep_types(self) -> None:
        """Make `guard` return futures unchanged from now on: DDP's C++ hooks refuse Python's."""
        self._keeps_types = True

    def guard(self, future: Any) -> Any:
        """Wrap a collective's future in one that `end` completes, should the collective not end."""
        if self._keeps_types:
            return future
        guarded = _Guarded(Future(), self._num_ends)

        def give(_: Future[None]) -> Any:
            if not future.done():
                raise GroupDown(_LEFT)
            return future.value()

        def end(_: Any) -> None:
            self._guarded.discard(guarded)
            guarded.open()

        given = guarded.gate.then(give)
        self._guarded.add(guarded)
        future.add_done_callback(end)
        return given

    def follow(self, work: Work) -> bool:
        """Wait for a collective; raise `GroupDown` if it is still running shortly after a call
        of `end`.
        """
        num_ends, deadline = self._num_ends, math.inf
        try:
            while True:
                try:
                    return work.wait(_LOOK)
                except RuntimeError as error:  # no call here: an interrupt would have it as context
                    ended = error
                # The collective has just ended, with or without an error, or its `wait` takes no
                # time-out.
                if work.is_completed() or "timeout not implemented" in str(ended):
                    return work.wait()
                del ended
                if self._num_ends != num_ends:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                if time.monotonic() > deadline:
                    raise GroupDown(_LEFT)
        except BaseException:
            self.has_left = self.has_left or not work.is_completed()
            raise

    def run(self, function: Callable[[], Any], limit_s: float | None = None) -> Any:
        """Call a function in a thread, and return its value; raise `GroupDown` upon `end`, or after
        `limit_s`.
        """
        values: list[Any] = []
        errors: list[BaseException] = []
        done = _thread.allocate_lock()
        done.acquire()

        def call() -> None:
            try:
                values.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                done.release()

        num_ends = self._num_ends
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        helper = self._idle.pop() if self._idle else _Helper()
        if not helper.ident:
            raise GroupDown(
                "the limit on processes and threads is reached, and this needs a thread"
            )
        self._num_waiting += 1
        try:
            helper.calls.put(call)
            while not done.acquire(True, _STEP_S):
                if self._num_ends != num_ends:
                    raise GroupDown(_LEFT)
                if time.monotonic() > deadline:
                    raise GroupDown(f"the wait for other ranks was given up after {limit_s:g} s")
        except BaseException:
            self._waits.stop_thread(helper.ident)
            helper.calls.put(functools.partial(self._waits.forget_thread, helper.ident))
            helper.calls.put(None)
            raise
        finally:
            self._num_waiting -= 1
        self._idle.append(helper)
        if errors:
            raise errors[0]
        return values[0]


class _Helper:
    """A reusable thread that executes queued calls until it gets None, because starting a thread
    takes longer than most calls.

    Its identity is 0 where a limit on threads is reached.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.ident = start_thread(self._serve)

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(BaseException):  # user code can raise in any thread
                if (call := self.calls.get()) is None:
                    return
                call()
                # With the last reference to a group goes a wait for the group's threads.
                del call


class PatientWork(Work):
    """A Work that forwards to another one, all but `wait`, which subclasses can interrupt."""

    def __init__(self, work: Work, patience: Patience) -> None:
        super().__init__()
        self._work, self._patience = work, patience


class PatientCollective(PatientWork):
    """Work of a gloo collective, with an interruptible `wait` and a future that can be ended.

    gloo does not end an operation whose message is on its way, or was about to be, when the other
    side dies (gloo/transport/tcp/pair.cc: `Pair::signalException` leaves out what `tx_` and `rx_`
    hold).
    """

    def __init__(
        self, work: Work, patience: Patience, spans: Spans, number: int, is_waited_for: bool = False
    ) -> None:
        super().__init__(work, patience)
        self._spans, self._number, self._is_waited_for = spans, number, is_waited_for

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._is_waited_for:
            self._spans.wait(self._number)
        if timeout == NO_TIMEOUT:
            done = self._patience.follow(self._work)
        else:
            done = self._work.wait(timeout)
        self._spans.end(self._number)
        return done

    def get_future(self) -> Any:
        future: Any = self._work.get_future()
        # Who waits for the future (DDP) may hold nothing else of this operation, which is found to
        # be under way as long as this object lives.
        future.add_done_callback(lambda _: self)
        return self._patience.guard(future)


class PatientMessage(PatientWork):
    """Work of a gloo send or receive, whose `wait` is interruptible if the message is large."""

    def __init__(
        self, work: Work, patience: Patience, spans: Spans, number: int, is_large: bool
    ) -> None:
        super().__init__(work, patience)
        self._spans, self._number, self._is_large = spans, number, is_large

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._spans.wait(self._number)
        # After a time-out gloo closes all connections.
        if self._is_large and timeout == NO_TIMEOUT:
            self._patience.run(self._work.wait)
        else:
            self._work.wait(timeout)
        self._spans.end(self._number)
        return True


class PatientReceive(PatientWork):
    """The Work of a gloo receive from any rank, with a `wait` that a cut of connections ends."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._work.is_completed():
            self._patience.run(lambda: self._work.wait(timeout))
        return True


def _pass_on(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._work, name)(*args, **kwargs)


for _name in dir(Work):
    if not _name.startswith(("__", "_pybind11")) and _name not in ("wait", "boxed", "unbox"):
        setattr(PatientWork, _name, _pass_on(_name))
