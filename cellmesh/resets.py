"""Registers functions that a rank calls after it has rebuilt its process groups (`on_heal`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_Callback = TypeVar("_Callback", bound=Callable[[], object])


def on_heal(callback: _Callback) -> _Callback:
    """Call a function on this rank after each rebuild of its process groups (`Mesh.heal`).

    The function resets state that outlives a training step and that cellmesh does not know, such as
    the counters and buckets of your own data-parallel class after a failure has cut its backward
    pass. The rank calls it without arguments, on its main thread, once its process groups work
    again and torch's models are reset. An exception in it is shown in the heal's report and does
    not fail the heal. It may use collectives if all ranks have registered it. Outside a rank,
    `on_heal` does nothing.

    A method is unregistered with its object. A function replaces an earlier one of the same module
    and name, so that a cell may be run again.

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
