"""Calls of functions that only the link's loop may call, from other threads."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ....errors import HostError
from ...core.core import Core, Effect

_T = TypeVar("_T")
Post = Callable[[Callable[[Core, float], Sequence[Effect]]], None]
# The loop takes up an order within milliseconds, unless callbacks keep it.
_ORDER_S = 30.0


def call_in_loop(post: Post, action: Callable[[], _T]) -> _T:
    """Have the link's loop call a function; return the function's result, or raise its exception.

    Args:
        post: gives the link's loop a command.
        action: is called there.

    Raises:
        NoMeshError: the mesh has ended, and its loop with it.
        HostError: the loop does not get to it in time; it will not call the function any more.
    """
    result: Future[_T] = Future()

    def act(core: Core, now: float) -> Sequence[Effect]:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(action())
            except BaseException as error:
                result.set_exception(error)
        return ()

    post(act)
    done, _ = concurrent.futures.wait([result], _ORDER_S)
    if not done and result.cancel():
        raise HostError(f"the notebook's link to the mesh is busy for {_ORDER_S:.0f} s: try again")
    return result.result()
