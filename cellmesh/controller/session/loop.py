"""What the link's thread waits on: descriptors, a time, and calls from other threads."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...errors import MeshUsageError
from ...stdlib import os, select, threading, time


class Loop:
    """Polls descriptors on one thread, which other threads can wake.

    Attributes:
        pid: the process that has the loop.
        thread: the identifier of the loop's thread; 0 before it runs, and after its end.
    """

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self.pid = os.getpid()
        self.thread = 0

    # ---- from any thread

    def check_pid(self) -> None:
        """Raise an error in a process forked from the one that has the loop.

        Raises:
            MeshUsageError: this is such a process.
        """
        if os.getpid() != self.pid:
            raise MeshUsageError(
                f"this process ({os.getpid()}) was forked from the one that holds the mesh "
                f"({self.pid}), and cannot use it: call the mesh there, or in another process that "
                "has left it to itself (`mesh.detach()`), with cellmesh.attach()"
            )

    def check_may_wait(self) -> None:
        """Raise an error if the caller would wait for the loop forever.

        Raises:
            MeshUsageError: the caller is a callback in the loop, or in a forked process.
        """
        if os.getpid() != self.pid:
            self.check_pid()
        if threading.get_ident() == self.thread:
            raise MeshUsageError(
                "a callback (`Run.on_end`) cannot wait for ranks: it is called where their "
                "answers arrive, and none would. `submit` there and give that run a callback, or "
                "wait on another thread"
            )

    def rouse(self) -> None:
        """Have `wait` return; does nothing after `close`, which must not run at the same time."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # ---- on the loop's thread

    def begin(self, descriptors: Iterable[int]) -> None:
        """Run on the calling thread from now on, and poll these descriptors."""
        self.thread = threading.get_ident()
        for number in descriptors:
            self._poll.register(number, select.POLLIN)

    def forget(self, number: int) -> None:
        """Stop polling a descriptor."""
        self._poll.unregister(number)

    def wait(self, until: float) -> list[int]:
        """Wait until a time by `time.monotonic`, or for a descriptor or `rouse`; return the
        descriptors that are ready.
        """
        left_ms = None if until == math.inf else max(0, int((until - time.monotonic()) * 1000 + 1))
        ready = []
        for number, _ in self._poll.poll(left_ms):
            if number == self._wake:
                os.eventfd_read(number)
            else:
                ready.append(number)
        return ready

    def close(self) -> None:
        """Close the loop's own descriptor, as its thread ends."""
        self.thread = 0  # another thread may get the number
        wake, self._wake = self._wake, -1
        os.close(wake)
