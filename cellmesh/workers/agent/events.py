"""The agent's event loop: calls handlers for descriptors, processes and signals."""

from __future__ import annotations

import enum
import functools
import os
import select
import signal
from collections.abc import Callable

from ...wire.faults import Faults

_MAX_EVENTS = 4096
Handler = Callable[[int], object]


class Order(enum.IntEnum):
    """Order in which handlers run when several descriptors are ready at once.

    Pipes go first, as a rank's output is in its pipe before its answer is in its socket. Sockets go
    before processes, so that a rank's last messages are handled before its end.
    """

    PIPE = 0
    SOCKET = 1
    PROCESS = 2


class Events:
    """An epoll loop with handlers; an exception in one handler does not stop the others."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._epoll = select.epoll()
        self._handlers: dict[int, tuple[Order, Handler]] = {}
        self._sockets: set[int] = set()  # descriptors of `Order.SOCKET`

    def add(self, number: int, order: Order, handler: Handler) -> None:
        """Call a handler with the epoll events when a descriptor is readable or hangs up."""
        self._handlers[number] = (order, handler)
        if order is Order.SOCKET:
            self._sockets.add(number)
        self._epoll.register(number, select.EPOLLIN)

    def want(self, number: int, read: bool, write: bool) -> None:
        """Choose whether to watch a descriptor for reading and for writing."""
        if number in self._handlers:
            self._epoll.modify(number, read * select.EPOLLIN | write * select.EPOLLOUT)

    def remove(self, number: int) -> None:
        """Stop watching a descriptor, before it is closed; ignore an unknown one."""
        if self._handlers.pop(number, None) is not None:
            self._sockets.discard(number)
            self._epoll.unregister(number)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for events or until a time-out, and call the handlers of the ready descriptors."""
        ready = self._epoll.poll(timeout_s, _MAX_EVENTS)
        if len(ready) > 1 and not self._sockets.issuperset([number for number, _ in ready]):
            ready.sort(key=self._order)
        for number, event in ready:
            entry = self._handlers.get(number)  # an earlier handler may have removed it
            if entry is not None:
                try:
                    entry[1](event)
                except Exception as error:
                    self._faults.take(error)

    def watch_process(self, pid: int, ended: Callable[[], None]) -> None:
        """Call a callback once a process has ended; for a child, the callback must reap it."""
        try:
            number = os.pidfd_open(pid)
        except ProcessLookupError:
            ended()
            return
        self.add(number, Order.PROCESS, functools.partial(self._process_ended, number, ended))

    def watch_signals(
        self, numbers: tuple[signal.Signals, ...], caught: Callable[[], None]
    ) -> None:
        """Call a callback from the loop when one of these signals arrives. Main thread only."""
        number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for name in numbers:
            signal.signal(name, lambda *_: os.eventfd_write(number, 1))

        def on_event(event: int) -> None:
            os.eventfd_read(number)
            caught()

        self.add(number, Order.PROCESS, on_event)

    def _order(self, event: tuple[int, int]) -> Order:
        entry = self._handlers.get(event[0])
        return Order.PROCESS if entry is None else entry[0]

    def _process_ended(self, number: int, ended: Callable[[], None], event: int) -> None:
        self.remove(number)
        os.close(number)
        ended()
