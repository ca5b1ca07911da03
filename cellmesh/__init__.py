"""Interactive distributed PyTorch from a notebook: persistent ranks, cell by cell.

`start` returns a `Mesh`; ``%load_ext cellmesh`` registers the magics. Importing this package
imports neither torch nor ZeroMQ: the names below are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .controller.mesh import Mesh as Mesh
    from .controller.run import Results as Results
    from .controller.run import Run as Run
    from .controller.session.attach import attach as attach
    from .controller.session.start import start as start
    from .errors import CellmeshError as CellmeshError
    from .errors import RankDied as RankDied
    from .errors import RankFailure as RankFailure
    from .errors import Released as Released
    from .resets import on_heal as on_heal
    from .wire.options import StartOptions as StartOptions

__version__ = "0.1.0"

_HOMES = {
    "Mesh": ".controller.mesh",
    "start": ".controller.session.start",
    "StartOptions": ".wire.options",
    "attach": ".controller.session.attach",
    "Results": ".controller.run",
    "Run": ".controller.run",
    "CellmeshError": ".errors",
    "RankDied": ".errors",
    "RankFailure": ".errors",
    "Released": ".errors",
    "on_heal": ".resets",
}

__all__ = [*_HOMES, "log", "__version__", "load_ipython_extension", "unload_ipython_extension"]


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
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    report = getattr(shell, "report_numbers", None)
    if report is not None:
        report(step, values)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
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
