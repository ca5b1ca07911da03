"""Operations of gloo whose waits can be interrupted by signals and ended by a release."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work

from ..trace.recorder import Spans
from .interruptible_wait import Patience

_NO_TIMEOUT = timedelta(0)


class _PatientWork(Work):
    """Forwards to another Work, except for `wait`."""

    def __init__(self, work: Work, patience: Patience) -> None:
        super().__init__()
        self._work, self._patience = work, patience


class _NotedWork(_PatientWork):
    """A Work whose waits and end are recorded for the timeline.

    One that is never waited for, or fails, may end in other ways (see `Spans`).
    """

    def __init__(
        self, work: Work, patience: Patience, spans: Spans, number: int, is_waited_for: bool = False
    ) -> None:
        super().__init__(work, patience)
        self._spans, self._number, self._is_waited_for = spans, number, is_waited_for


class PatientCollective(_NotedWork):
    """A gloo collective with an interruptible `wait`, and with a future that can be ended where C++
    waits.

    gloo does not end an operation whose message is on its way, or was about to be, when the other
    side dies (gloo/transport/tcp/pair.cc: `Pair::signalException` leaves out what `tx_` and `rx_`
    hold).
    """

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._is_waited_for:
            self._spans.wait(self._number)
        done = (
            self._patience.follow(self._work)
            if timeout == _NO_TIMEOUT
            else self._work.wait(timeout)
        )
        self._spans.end(self._number)
        return done

    def get_future(self) -> Any:
        future: Any = self._work.get_future()
        # Who waits for the future (DDP) may hold nothing else of this operation, which is found to
        # be under way as long as this object lives.
        future.add_done_callback(lambda _: self)
        return self._patience.guard(future)


class PatientMessage(_NotedWork):
    """A gloo message, whose `wait` is interruptible if the message is large."""

    def __init__(
        self, work: Work, patience: Patience, spans: Spans, number: int, is_large: bool
    ) -> None:
        super().__init__(work, patience, spans, number)
        self._is_large = is_large

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._spans.wait(self._number)
        if timeout != _NO_TIMEOUT:
            self._work.wait(timeout)  # gloo closes all connections when it is over
        elif self._is_large:
            self._patience.run(self._work.wait)
        else:
            self._work.wait()
        self._spans.end(self._number)
        return True


class PatientReceive(_PatientWork):
    """A receive from any sender, which gloo does not end when connections are cut."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._work.is_completed():
            self._patience.run(lambda: self._work.wait(timeout))
        return True


def _pass_on(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._work, name)(*args, **kwargs)


for _name in dir(Work):
    if not _name.startswith(("__", "_pybind11")) and _name not in ("wait", "boxed", "unbox"):
        setattr(_PatientWork, _name, _pass_on(_name))
