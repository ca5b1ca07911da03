"""Threads of cellmesh's own on a rank, which start even if user code has patched `threading`."""

from __future__ import annotations

import _thread
import functools
import sys
from collections.abc import Callable
from typing import Any

_MAX_SWITCH_S = 0.02


def start_thread(function: Callable[..., object], *args: Any) -> int:
    """Run a function in a daemon thread.

    Below `threading`, whose Thread user code may have replaced, and whose hooks
    (``threading.settrace``, ``setprofile``) run in every new thread before its function and may
    raise there.

    Returns:
        Its identity; 0 where a limit on processes and threads is reached.
    """
    try:
        return _thread.start_new_thread(function, args)
    except RuntimeError:
        return 0


def bound_switch_interval() -> None:
    """From now on, cap what ``sys.setswitchinterval`` sets.

    The control thread waits that long for a main thread that computes in Python, several times for
    one stop.
    """
    set_interval = sys.setswitchinterval

    @functools.wraps(set_interval)
    def set_bounded(interval: float, /) -> None:
        set_interval(min(interval, _MAX_SWITCH_S))

    sys.setswitchinterval = set_bounded
