"""Waits for other ranks (in C++ calls, for gloo's operations, for keys of c10d stores) that signals
and other threads can end.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
from _queue import SimpleQueue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work
from torch.distributed import DistStoreError
from torch.futures import Future

from ...errors import GroupDown
from ...stdlib import threading, time
from ..linux_process import start_thread
from ..trace.recorder import Spans

_STEP_S = 0.02
# Longest single wait for a collective, which returns at once when the collective ends.
_LOOK = timedelta(seconds=0.1)
# A request to a store takes 20 us; the first waits are short, as peers usually call at the same
# time.
_FIRST_STEP_S = 0.0005
# How long operations that were cut may take to end.
_GRACE_S = 0.5
NO_TIMEOUT = timedelta(0)
_LEFT = "the wait for other ranks was ended: they do not take part any more"


class Waits:
    """The waits of a rank's threads for other ranks: signals interrupt them, and `end`, called on
    any thread, ends them.
    """

    def __init__(self) -> None:
        self._num_ends = 0
        self._num_waiting = 0
        # Futures whose completion ends C++'s wait for a collective -> number of ends before.
        self._guarded: dict[Future[None], int] = {}
        self._keeps_types = False
        self._idle: list[_Helper] = []
        self._left_threads: set[int] = set()  # abandoned helpers, whose waits end at once
        self.has_left = False  # whether a collective was abandoned before it ended

    def end(self) -> int:
        """End every wait in `run` and `until`, and complete the futures of `guard` that were
        already pending at the previous call of `end`; return the number of waits ended.
        """
        num_waiting = self._num_waiting  # all of them have read the old `_num_ends`
        self._num_ends += 1
        guarded = self._guarded.copy().items()
        left = [gate for gate, num_ends in guarded if num_ends < self._num_ends - 1]
        for gate in left:
            self.has_left = True
            self._open(gate)
        return num_waiting + len(left)

    def until(self, is_over: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll until a condition holds; raise DistStoreError after `limit_s` or upon `end`."""
        num_ends, deadline, step_s = self._num_ends, time.monotonic() + limit_s, _FIRST_STEP_S
        ident = threading.get_ident()
        self._num_waiting += 1
        try:
            while not is_over():
                if self._num_ends != num_ends or ident in self._left_threads:
                    raise DistStoreError(f"the wait for {what} was ended")
                if time.monotonic() > deadline:
                    raise DistStoreError(f"wait timeout after {limit_s:g} s, {what}")
                time.sleep(step_s)
                step_s = min(1.5 * step_s, _STEP_S)
        finally:
            self._num_waiting -= 1

    def keep_types(self) -> None:
        """Make `guard` return futures as they are from now on, as DDP's C++ hooks refuse Python
        futures.
        """
        self._keeps_types = True

    def guard(self, future: Any) -> Any:
        """Wrap a collective's future in one that `end` completes if the collective does not end."""
        if self._keeps_types:
            return future
        gate: Future[None] = Future()

        def give(_: Future[None]) -> Any:
            if not future.done():
                raise GroupDown(_LEFT)
            return future.value()

        given = gate.then(give)
        self._guarded[gate] = self._num_ends
        future.add_done_callback(lambda _: self._open(gate))
        return given

    def _open(self, gate: Future[None]) -> None:
        if self._guarded.pop(gate, None) is not None:
            gate.set_result(None)

    def follow(self, work: Work) -> bool:
        """Wait for a collective; raise `GroupDown` if it still runs shortly after `end`."""
        num_ends, deadline = self._num_ends, math.inf
        try:
            while True:
                try:
                    return work.wait(_LOOK)
                except RuntimeError as error:  # no call here: it would be an interrupt's context
                    ended = error
                # Either the collective has just ended, with or without an error, or its `wait`
                # supports no time-out.
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
        `limit_s` seconds.
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
            self._left_threads.add(helper.ident)
            # Once the helper has ended, another thread may get its identity.
            helper.calls.put(functools.partial(self._left_threads.discard, helper.ident))
            helper.calls.put(None)
            raise
        finally:
            self._num_waiting -= 1
        self._idle.append(helper)
        if errors:
            raise errors[0]
        return values[0]


class _Helper:
    """A reusable thread that executes queued calls until it receives None, as starting a thread
    takes longer than most calls.

    Its `ident` is 0 if the limit on threads is reached.
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
                # A kept call may hold the last reference to a group, whose end waits for threads.
                del call


class PatientWork(Work):
    """A Work that forwards to another Work, except for `wait`, which subclasses can interrupt."""

    def __init__(self, work: Work, waits: Waits) -> None:
        super().__init__()
        self._work, self._waits = work, waits

    def get_future(self) -> Any:
        future: Any = self._work.get_future()
        # DDP may hold only the future, and the operation counts as in flight while this object
        # lives.
        future.add_done_callback(lambda _: self)
        return self._waits.guard(future)


class GlooWork(PatientWork):
    """The Work of a gloo collective or message, with an interruptible `wait`, and with a future
    that `Waits.end` can complete.

    gloo does not end an operation whose message was in flight, or about to be, when its peer dies
    (gloo/transport/tcp/pair.cc: `Pair::signalException` skips the operations in `tx_` and `rx_`).

    Args:
        work: gloo's Work.
        waits: waits of the rank.
        spans: recorder of the operation's times, under `number`.
        number: number of the operation's span.
        is_sync: whether its wait follows at once, and has been recorded.
        is_message: whether it is a send or receive: after the time-out of one, gloo closes all
            connections.
        runs: whether to wait for a message in another thread.
    """

    def __init__(
        self,
        work: Work,
        waits: Waits,
        spans: Spans,
        number: int,
        is_sync: bool = False,
        is_message: bool = False,
        runs: bool = False,
    ) -> None:
        super().__init__(work, waits)
        self._spans, self._number, self._is_sync = spans, number, is_sync
        self._is_message, self._runs = is_message, runs

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._is_sync:
            self._spans.wait(self._number)
        if self._runs:
            done = self._waits.run(functools.partial(self._work.wait, timeout))
        elif self._is_message or timeout != NO_TIMEOUT:
            done = self._work.wait(timeout)
        else:
            done = self._waits.follow(self._work)
        self._spans.end(self._number)
        return bool(done)


def _pass_on(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._work, name)(*args, **kwargs)


for _name in dir(Work):
    _is_own = _name in ("wait", "get_future", "boxed", "unbox")
    if not _is_own and not _name.startswith(("__", "_pybind11")):
        setattr(PatientWork, _name, _pass_on(_name))
