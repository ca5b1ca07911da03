"""Adapts `torch.distributed.rpc` to ranks that are interrupted, restarted and replaced.

- ``init_rpc`` counts its calls, and prefixes its keys in the store with the count. A rank that is
  new, or did not take part in earlier calls, would have another count. The same holds for the
  gatherings by which RPC begins and ends, and for the barriers of ``shutdown``, which C++ counts
  over the life of the process.
- ``Future.wait`` waits in C++ and ignores signals until its future is done, which may be never for
  a call without a time-out.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed.rpc as rpc

from ...stdlib import threading
from .store import InterruptibleStore
from .waits import Waits

# "rpc_prefix_3/shutdown/READY_ID_7": the seventh barrier of this process; in another process it may
# be the first.
_BARRIER = re.compile(r"(.*/shutdown/[A-Z_]+)_ID_([0-9]+)")


class RemoteCallsStore(InterruptibleStore):
    """The c10d store of one ``init_rpc`` call, which numbers RPC's barriers from zero in the keys
    of the store.
    """

    def __init__(self, store: Any, waits: Waits) -> None:
        super().__init__(store, waits)
        self._first_barrier: int | None = None

    def _name(self, key: str) -> str:
        if (found := _BARRIER.fullmatch(key)) is None:
            return key
        if self._first_barrier is None:
            self._first_barrier = int(found[2])
        return f"{found[1]}/{int(found[2]) - self._first_barrier}"

    def set(self, key: str, value: str | bytes) -> None:
        super().set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return super().get(self._name(key))

    def add(self, key: str, amount: int) -> int:
        return int(super().add(self._name(key), amount))

    def check(self, keys: list[str]) -> bool:
        return bool(super().check([self._name(key) for key in keys]))


def refuse_if_running() -> None:
    """Raise RuntimeError if RPC is already initialized on this rank, before ``init_rpc`` waits for
    other ranks.
    """
    if rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        raise RuntimeError("RPC is already initialized")


def begin(number: int) -> None:
    """Set RPC's call counter for this ``init_rpc`` to the number that all its callers agreed on."""
    rpc._init_counter = number
    forget_gatherings()


def forget_gatherings() -> None:
    """Reset the counters of RPC's all-gathers, as on a new rank, and drop those in progress."""
    if rpc.is_available():
        with rpc.api._all_gather_dict_lock:
            rpc.api._all_gather_sequence_id.clear()
            rpc.api._all_gather_sequence_id_to_states.clear()


def let_waits_be_interrupted() -> None:
    """Let a KeyboardInterrupt end the main thread's waits for ``torch.futures.Future``."""
    wait_in_cpp = torch._C.Future.wait

    def wait(future: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            done.wait()
        return wait_in_cpp(future)

    torch._C.Future.wait = wait  # type: ignore[assignment, method-assign]
