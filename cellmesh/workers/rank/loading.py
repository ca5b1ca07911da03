"""Imports the modules of a rank's optional features (bars, inspector, debugger).

A feature leans on libraries, and on parts of Python, that change with their versions. The zygote
imports the features for all ranks, but nothing that a rank needs to start or to run a cell does: a
module that cannot be imported is reported where its feature is used, by name.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from ...errors import CellmeshError
from .import_hooks import AfterImport

# The features that many ranks use, as modules of `cellmesh.workers`; others are imported when they
# are used.
PREIMPORTED = (
    "progress",
    "rank.debugger",
    "inspect.handler",
    "complete",
)


def preimport() -> None:
    """Import `PREIMPORTED` in the zygote; errors are written into the zygote's log."""
    for module in PREIMPORTED:
        try:
            load(module)
        except CellmeshError:
            traceback.print_exc()


def load(module: str) -> Any:
    """Import a module of a feature; raise CellmeshError that names what cannot be imported."""
    name = f"cellmesh.workers.{module}"
    try:
        return importlib.import_module(name)
    except Exception as error:
        # What failed may be a module that this one imports.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"].startswith(
                "cellmesh."
            ):
                name = frame.f_globals["__name__"]
        raise CellmeshError(
            f"{name} cannot be imported ({type(error).__name__}: {error}), so what needs it does "
            "not work: `python -m pip check` shows which packages are too old"
        ) from error


def load_or_say(module: str, libraries: Iterable[str]) -> Any:
    """Import a feature that patches a library of the user; print a remark and return None if the
    feature cannot be imported.

    The cell that imports one of the libraries then shows why; a library that torch has imported
    before works by itself, without the feature.
    """
    try:
        return load(module)
    except CellmeshError as error:
        text = f"cellmesh: {error}"
        AfterImport(
            dict.fromkeys(libraries, lambda library: print(text, file=sys.stderr))
        ).install()
        return None
