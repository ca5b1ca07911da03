"""Interactive distributed PyTorch from a notebook: persistent ranks, cell by cell.

`start` returns a `Mesh`; ``%load_ext cellmesh`` registers the magics. Importing this package
imports neither torch nor ZeroMQ: the names below are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .controller.links import link as link
    from .controller.mesh import Mesh as Mesh
    from .controller.meshes import Meshes
    from .controller.run import Results as Results
    from .controller.run import Run as Run
    from .controller.session.attach import attach as attach
    from .controller.session.start import start as start
    from .errors import CellmeshError as CellmeshError
    from .errors import RankDied as RankDied
    from .errors import RankFailure as RankFailure
    from .errors import Released as Released
    from .wire.options import StartOptions as StartOptions

    meshes: Meshes

__version__ = "0.1.0"

_Callback = TypeVar("_Callback", bound=Callable[[], object])

_HOMES = {
    "Mesh": ".controller.mesh",
    "link": ".controller.links",
    "start": ".controller.session.start",
    "StartOptions": ".wire.options",
    "attach": ".controller.session.attach",
    "Results": ".controller.run",
    "Run": ".controller.run",
    "CellmeshError": ".errors",
    "RankDied": ".errors",
    "RankFailure": ".errors",
    "Released": ".errors",
}

__all__ = [*_HOMES, "meshes", "log", "on_heal", "group", "__version__"]
__all__ += ["load_ipython_extension", "unload_ipython_extension"]


def log(*, step: float | None = None, **values: Any) -> None:
    """Report numbers of a rank to ``%dist_plot`` and ``mesh.plot``; outside a rank, do nothing.

    The call is cheap (numbers are sent together, a few times a second) and is no collective: ranks
    may report different names at different times. A tensor is read at once, which waits for its
    GPU.

    Args:
        step: x coordinate of these points; None for each name's last step plus one.
        values: name -> a number, or a tensor with one element.

    Raises:
        MeshUsageError: a value is not a number.
    """
    report = _of_rank("report_numbers")
    if report is not None:
        report(step, values)


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
    register = _of_rank("call_at_heal")
    if register is not None:
        register(callback)
    return callback


def group(name: str) -> Any:
    """Return the process group of a link with another mesh (`link`), in code of a rank.

    Its ranks are those of both meshes, the first mesh's first, and ``src`` and ``dst`` count in it:
    ``dist.broadcast(tensor, 0, group=cm.group("weights"))`` sends from the first mesh's rank 0.
    ``group.rank()`` is this rank's number. If a rank of either mesh fails, operations in progress
    raise `Released`, and the next ones work again once both meshes are whole.

    Args:
        name: name of the link.

    Raises:
        MeshUsageError: there is no such link, or this process is no rank.
    """
    find = _of_rank("find_group")
    if find is None:
        from .errors import MeshUsageError

        raise MeshUsageError(f"cellmesh.group({name!r}) is for code on ranks, and this is none")
    return find(name)


def _of_rank(name: str) -> Callable[..., Any] | None:
    """Return a function of a rank's IPython shell by its name; None in a process that is no
    rank.
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return getattr(shell, name, None)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name == "meshes":
        from .controller.meshes import own_meshes

        return own_meshes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics (``%load_ext cellmesh``) and import torch in a background process."""
    from .controller.session.launch import prestart

    prestart.begin_prestart(shell, prestart.KEEP_S)  # it runs while the magics are imported below
    from .magics.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics (``%unload_ext cellmesh``); a mesh keeps running for a later load."""
    from .controller.session.launch.prestart import end_prestart
    from .magics.extension import unload

    unload(shell)
    end_prestart(shell)
