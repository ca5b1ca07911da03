"""Run what blocks in C++ so that its caller can be called off: in a thread that is left behind then."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work

from ...errors import GroupDown
from ...stdlib import threading, time
from ..spans import Spans
from ..threads import start_thread
from .store import Waits

_STEP_S = 0.02
# One look at a collective; what ends meanwhile is seen at once.
_LOOK = timedelta(seconds=0.1)
_NO_TIMEOUT = timedelta(0)
# How long operations that were cut may take to notice.
_GRACE_S = 0.5


class Patience:
    """Waits for C++ on behalf of a rank; `end` ends all waits, from any thread.

    Args:
        waits: of the stores that a function may ask: one that is left behind must stop asking.

    Attributes:
        has_left: whether a collective was left behind that had not ended.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._num_ends = 0
        self._num_waiting = 0
        self.has_left = False

    def end(self) -> int:
        """Let every `run` raise.

        Returns:
            How many there were.
        """
        self._num_ends += 1
        return self._num_waiting

    def follow(self, work: Work) -> bool:
        """Wait for a collective, within reach of signals.

        Raises:
            GroupDown: `end` was called, and the collective did not notice.
            RuntimeError: of the collective.
        """
        num_ends, deadline = self._num_ends, math.inf
        try:
            while True:
                try:
                    return work.wait(_LOOK)
                except RuntimeError as error:
                    # It has ended meanwhile, with an error of its own or without; or cannot wait shortly.
                    if work.is_completed() or "timeout not implemented" in str(error):
                        return work.wait()
                if self._num_ends != num_ends:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                if time.monotonic() > deadline:
                    raise GroupDown("the wait for other ranks was ended: they will not come")
        except BaseException:
            self.has_left = self.has_left or not work.is_completed()
            raise

    def run(self, function: Callable[[], object], limit_s: float | None = None) -> None:
        """Call a function and wait for its end, within reach of signals.

        Args:
            function: what to call, in a thread; what it returns is dropped.
            limit_s: how long it may take; None for as long as it takes.

        Raises:
            GroupDown: `end` was called, or it took too long.
        """
        errors: list[BaseException] = []
        done = threading.Event()

        def call() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)
            finally:
                self._waits.forget_thread(threading.get_ident())
                done.set()

        num_ends = self._num_ends
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        thread = 0
        self._num_waiting += 1
        try:
            thread = start_thread(call)
            if not thread:
                raise GroupDown("the limit on processes and threads is reached, and this needs a thread")
            while not done.wait(_STEP_S):
                if self._num_ends != num_ends:
                    raise GroupDown("the wait for other ranks was ended: they will not come")
                if time.monotonic() > deadline:
                    raise GroupDown(f"the wait for other ranks was given up after {limit_s:g} s")
        except BaseException:
            if thread and not done.is_set():
                self._waits.stop_thread(thread)
            raise
        finally:
            self._num_waiting -= 1
        if errors:
            raise errors[0]


class _PatientWork(Work):
    """Passes on to another Work, but for `wait`."""

    def __init__(self, work: Work, patience: Patience) -> None:
        super().__init__()
        self._work, self._patience = work, patience


class _NotedWork(_PatientWork):
    """A Work of which the rank's past tells when it was waited for, and when it ended.

    One that is never waited for, or fails, may end in other ways (see `Spans`).
    """

    def __init__(
        self, work: Work, patience: Patience, spans: Spans, number: int, is_waited_for: bool = False
    ) -> None:
        super().__init__(work, patience)
        self._spans, self._number, self._is_waited_for = spans, number, is_waited_for


class PatientCollective(_NotedWork):
    """A gloo collective whose `wait` signals reach.

    gloo does not tell an operation that is in the middle of a message when the other side dies.
    """

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._is_waited_for:
            self._spans.wait(self._number)
        done = self._patience.follow(self._work) if timeout == _NO_TIMEOUT else self._work.wait(timeout)
        self._spans.end(self._number)
        return done

    def get_future(self) -> Any:
        future: Any = self._work.get_future()
        # Who waits for the future (DDP, for that of a communication hook) may hold nothing else of this
        # operation, which is found to be under way as long as this object lives.
        future.add_done_callback(lambda _: self)
        return future


class NotedMessage(_NotedWork):
    """A message whose wait is noted."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._spans.wait(self._number)
        done = self._work.wait() if timeout == _NO_TIMEOUT else self._work.wait(timeout)
        self._spans.end(self._number)
        return done


class PatientReceive(_PatientWork):
    """A receive from anyone: gloo does not end that when connections are cut."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._work.is_completed():
            self._patience.run(lambda: self._work.wait(timeout))
        return True


def _pass_on(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._work, name)(*args, **kwargs)


for _name in dir(Work):
    if not _name.startswith(("__", "_pybind11")) and _name not in ("wait", "boxed", "unbox"):
        setattr(_PatientWork, _name, _pass_on(_name))
