"""Waits for other ranks (in C++ calls, for gloo's operations, for keys of c10d stores) such that
signals and releases end them.
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
# One look at a collective; the end of a collective is seen at once.
_LOOK = timedelta(seconds=0.1)
# A question to a store costs 20 us there and back; the first waits are short, as peers usually
# call at once.
_FIRST_STEP_S = 0.0005
# How long operations that were cut may take to notice.
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
        # Futures whose completion ends a wait of C++ for a collective -> number of ends before.
        self._guarded: dict[Future[None], int] = {}
        self._keeps_types = False
        self._idle: list[_Helper] = []
        self._left_threads: set[int] = set()  # whose waits end at once
        self.has_left = False  # whether a collective was left behind that had not ended

    def end(self) -> int:
        """End every `run` and `until`, and complete the futures of `guard` that were already
        pending at the previous call of `end`; return how many waits this ends.
        """
        num_waiting = self._num_waiting  # these have all read `_num_ends` before
        self._num_ends += 1
        guarded = self._guarded.copy().items()
        left = [gate for gate, num_ends in guarded if num_ends < self._num_ends - 1]
        for gate in left:
            self.has_left = True
            self._open(gate)
        return num_waiting + len(left)

    def until(self, is_over: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll a store until a condition holds; raise DistStoreError at the limit or upon `end`."""
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
        """Make `guard` return futures unchanged from now on: DDP's C++ hooks refuse Python's."""
        self._keeps_types = True

    def guard(self, future: Any) -> Any:
        """Wrap a collective's future in one that `end` completes, should the collective not end."""
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
            self._left_threads.add(helper.ident)
            # When it has ended, another thread may have its identity.
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

    def __init__(self, work: Work, waits: Waits) -> None:
        super().__init__()
        self._work, self._waits = work, waits

    def get_future(self) -> Any:
        future: Any = self._work.get_future()
        # DDP may hold nothing but the future, and the operation is found to be under way as long
        # as this object lives.
        future.add_done_callback(lambda _: self)
        return self._waits.guard(future)


class GlooWork(PatientWork):
    """Work of a gloo collective or message, with an interruptible `wait`, and a future that can be
    ended.

    gloo does not end an operation whose message is on its way, or was about to be, when the other
    side dies (gloo/transport/tcp/pair.cc: `Pair::signalException` leaves out what `tx_` and `rx_`
    hold).

    Args:
        work: gloo's.
        waits: of the rank.
        spans: where the operation's times are noted, under `number`.
        is_sync: whether its wait follows at once, and has been noted.
        is_message: whether it is a send or receive: after a time-out of one, gloo closes all
            connections.
        runs: whether a message is waited for in another thread.
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
