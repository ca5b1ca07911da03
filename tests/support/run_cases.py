"""A run without a mesh: ranks are told to settle here."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.run import Run
from cellmesh.wire import payload
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Died, Done, Failed
from cellmesh.workers.rank.stack_inspection import stack_of_main_thread

from .runs import FakeControl, work_item

WAIT_S = 10.0


class Sink(ConsoleSink):
    """Keeps what a run shows."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        super().__init__(self.out, self.out)

    @property
    def text(self) -> str:
        return self.out.getvalue()


class Case:
    """A run and what the link would do to it."""

    def __init__(
        self, ranks: int | Sequence[int] = 2, single: bool = False, title: str = "the call"
    ) -> None:
        self.sink = Sink()
        self.interrupted = threading.Event()
        ranks = range(ranks) if isinstance(ranks, int) else ranks
        self.num_interrupts = 0
        self.control = FakeControl(self._interrupt)
        item = work_item(ranks, title, single)
        self.run: Run[Any] = Run(1, item, Printer(ranks, self.sink), self.control)
        self._left = set(ranks)

    def _interrupt(self) -> None:
        self.num_interrupts += 1
        self.interrupted.set()

    def settle(self, ranks: Sequence[int], verb: Any, buffers: Sequence[Any] = ()) -> None:
        self.run.settle(tuple(ranks), Parcel(verb, tuple(buffers)), 0.0)
        self._left -= set(ranks)
        if not self._left:
            self.run.finish(0.0)

    def give(self, rank: int, value: Any) -> None:
        pickled, buffers = payload.dumps(value, "value")
        self.settle((rank,), Done(1, pickled), [bytearray(buffer) for buffer in buffers])

    def fail(self, rank: int, error: BaseException, line: int = 3) -> None:
        pickled, buffers = payload.dumps(error, "error")
        kind = type(error).__name__
        self.settle(
            (rank,), Failed(1, kind, str(error), f"Traceback {kind}", line, pickled), buffers
        )

    def die(self, rank: int) -> None:
        self.settle((rank,), Died(rank, "killed by SIGKILL", "last words"))


@contextlib.contextmanager
def beside(function: Callable[[], None]) -> Iterator[None]:
    """Run a function in another thread; wait for it at the end."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def press_stop_once_main_waits_in(
    name: str, until: Callable[[], bool] = lambda: True, file: str = "controller/run.py"
) -> None:
    """Send SIGINT to the main thread once it is in this function of `Run` (call it from another
    thread).
    """
    main = threading.main_thread()
    assert main.ident is not None
    gave_up_at = time.monotonic() + WAIT_S
    never = threading.Event()
    while time.monotonic() < gave_up_at:
        for frame in stack_of_main_thread():
            code = frame.f_code
            if code.co_name == name and code.co_filename.endswith(file) and until():
                signal.pthread_kill(main.ident, signal.SIGINT)
                return
        never.wait(0.002)
