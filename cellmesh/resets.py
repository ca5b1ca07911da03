"""Lets user code on a rank be called when process groups have been rebuilt (`on_heal`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_Callback = TypeVar("_Callback", bound=Callable[[], object])


def on_heal(callback: _Callback) -> _Callback:
    """Call a function on this rank after each heal; anywhere but on a rank, do nothing.

    For state across steps that only its owner can reset, such as the counters and buckets of a
    data-parallel class of your own, whose backward pass a failure may have cut. It is called
    without arguments, on the main thread, when process groups work again and models of torch are
    reset. An exception in it is shown with the heal's report and fails nothing. It may use
    collectives if all ranks have registered it.

    A method is forgotten with its object. A function replaces an earlier one of the same module and
    name, so that a cell may be run again.

    Args:
        callback: a function without arguments.

    Returns:
        The callback, so that `on_heal` can decorate it.
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    register = getattr(shell, "call_at_heal", None)
    if register is not None:
        register(callback)
    return callback
