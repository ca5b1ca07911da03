"""What `torch.distributed.rpc` needs on ranks that are stopped, restarted and replaced.

- ``init_rpc`` tells its calls apart by counting them, and takes the count for a prefix of its keys in the
  store. A rank that is new, or was not among the callers before, would count differently from the others. So
  it is with the gatherings by which RPC begins and ends.
- ``Future.wait`` waits in C++ and looks at no signal until its future is done, which for a call that has no
  time-out is never.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc

from ...stdlib import threading


def begin(number: int) -> None:
    """Let the ``init_rpc`` that is under way count as all who call it have agreed.

    Args:
        number: the same on all of them.
    """
    rpc._init_counter = number
    if not rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        forget_gatherings()


def forget_gatherings() -> None:
    """Let RPC's gatherings count from nothing, as on a rank that is new."""
    if rpc.is_available():
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
