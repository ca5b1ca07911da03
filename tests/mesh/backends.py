"""Backends that torch does not know, for tests; the ranks import this module."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

NO_TIMEOUT = timedelta(0)


class LazyWork(dist.Work):
    """Does all its work in `wait`, and does not say whether it is completed."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self._act = act

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._act()
        return True


class Lazy(dist.ProcessGroup):
    """Sums through the store, in the `wait` of its Work, and waits with every signal blocked."""

    events: ClassVar[list[str]] = []
    refusal = ""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._rank, self._size, self._number = store, rank, size, 0
        self._is_aborted = threading.Event()
        self.events.append("constructed")

    def getBackendName(self) -> str:
        return "lazy"

    def allreduce(self, tensors: Any, opts: Any = None) -> LazyWork:
        self._number += 1
        number = self._number

        def act() -> None:
            self._store.set(f"{number}/{self._rank}", str(tensors[0].item()))
            keys = [f"{number}/{rank}" for rank in range(self._size)]
            _wait_deaf(lambda: self._is_aborted.is_set() or self._store.check(keys))
            if self._is_aborted.is_set():
                raise RuntimeError("aborted")
            tensors[0].fill_(sum(float(self._store.get(key)) for key in keys))

        return LazyWork(act)

    def abort(self) -> None:
        self.events.append("aborted")
        self._is_aborted.set()

    def shutdown(self) -> None:
        self.events.append("shut down")


def _wait_deaf(is_over: Any) -> None:
    """Wait as C++ does: no signal and no exception of another thread ends it."""
    done = threading.Event()

    def look() -> None:
        while not is_over():
            done.wait(0.01)
        done.set()

    threading.Thread(target=look, daemon=True).start()
    while not done.is_set():
        try:
            done.wait()
        except BaseException:
            continue


class Blocking(dist.ProcessGroup):
    """Sums in the operation itself, through a gloo group of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "blocking"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self._gloo.allreduce(tensors).wait()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(tensors)
        return _create_work_from_future(done)


class Stubborn(Lazy):
    """A backend that ignores its `abort`, which never returns."""

    events: ClassVar[list[str]] = []

    def abort(self) -> None:
        threading.Event().wait()


def register() -> None:
    for kind in (Lazy, Blocking, Stubborn):
        dist.Backend.register_backend(kind.__name__.lower(), kind, devices=["cpu"])
