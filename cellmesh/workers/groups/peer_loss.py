"""Distinguishes a collective that ended with its connections from one that failed.

gloo and NCCL raise a RuntimeError then. Where Python waits for the collective (``dist.all_reduce``
and its like), it becomes what it stands for, `Released` or KeyboardInterrupt, so that ``except
Exception`` in a training loop does not take it for an error of the step. Where C++ waits (DDP's
backward pass, ``wait()`` of an asynchronous operation) it stays what it is, and the rank's executor
reports it as what it was.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed import c10d_logger

from ...stdlib import threading, time
from ..static_lookup import args_of

# What gloo and NCCL say when a connection ends under an operation.
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|not connected|Socket closed|pair closure|"
    r"communicator was aborted"
)
# How long after the loss of a connection this rank is told to stop, where it is: a death takes the
# settle time to be followed by the release. Peers whose own time-out for a group is over close
# connections, too.
_TOLD_WITHIN_S = 3.0
_LOOK_S = 0.02


def lost_its_peers(error: BaseException) -> bool:
    """Whether an operation failed only because a connection was closed."""
    if not issubclass(type(error), RuntimeError):
        return False
    texts = [
        part for part in args_of(error) if type(part) is str
    ]  # its own `__str__` may do anything
    return _LOST.search(" ".join(texts)) is not None


def raise_as_stops(kind: Callable[[], type[KeyboardInterrupt] | None]) -> None:
    """From now on, raise in a collective the interrupt or release that cut its connections.

    torch passes every error of a collective through one function, to log it (``c10d_logger``, the
    same in torch 2.11 to 2.13): here it is exchanged.

    Args:
        kind: returns how the current run was stopped, None if it was not.
    """
    describe = c10d_logger._get_msg_dict

    def describe_or_stop(*args: Any, **kwargs: Any) -> dict[str, Any]:
        error = sys.exc_info()[1]
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and error is not None and lost_its_peers(error):
            told_by = time.monotonic() + _TOLD_WITHIN_S
            while (stop := kind()) is None and time.monotonic() < told_by:
                time.sleep(
                    _LOOK_S
                )  # others may have cut the connection before this rank's message arrives
            if stop is not None:
                raise stop() from error
        return describe(*args, **kwargs)

    c10d_logger._get_msg_dict = describe_or_stop
