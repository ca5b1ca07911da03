"""What `torch.distributed.rpc` needs on ranks that are stopped, restarted and replaced.

- ``init_rpc`` tells its calls apart by counting them, and takes the count for a prefix of its keys in the
  store. The store outlives a rank here, so a new rank that counted from nothing would find the keys of
  earlier ones; and it would count differently from those that have lived on. So it is with the gatherings
  by which RPC begins and ends.
- ``Future.wait`` waits in C++ and looks at no signal until its future is done, which for a call that has no
  time-out is never.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc

_INCARNATION, _GENERATION = 1 << 128, 1 << 32


def count_from(incarnation: int) -> None:
    """Let ``init_rpc`` count from a number of this start or restart of the mesh."""
    if rpc.is_available():
        rpc._init_counter = incarnation * _INCARNATION


def count_on(generation: int) -> None:
    """Let ``init_rpc`` count from a number that is the same on all who heal, and new."""
    if rpc.is_available():
        incarnation = rpc._init_counter // _INCARNATION
        rpc._init_counter = incarnation * _INCARNATION + generation * _GENERATION
        rpc.api._all_gather_sequence_id.clear()


def let_waits_be_interrupted() -> None:
    """From now on, let a KeyboardInterrupt end the main thread's wait for a ``torch.futures.Future``."""
    wait_in_cpp = torch._C.Future.wait

    def wait(future: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            done.wait()
        return wait_in_cpp(future)

    torch._C.Future.wait = wait  # type: ignore[assignment, method-assign]
