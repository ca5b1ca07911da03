"""Imports the modules of a rank's optional features (bars, inspector, debugger), and calls hooks
when user code imports certain modules.

Features depend on libraries, and on parts of Python, that change between versions. The zygote
imports the features for all ranks, but nothing that a rank needs to start or to run a cell imports
them: if the import of a feature fails, the error is raised where it is used, with its name.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import CellmeshError

# Features that many ranks use, as modules of `cellmesh.workers`; others are imported on first use.
PREIMPORTED = (
    "progress",
    "rank.debugger",
    "inspect.handler",
    "complete",
)


def preimport() -> None:
    """Import `PREIMPORTED` in the zygote; errors are written to the zygote's log."""
    for module in PREIMPORTED:
        try:
            load(module)
        except CellmeshError:
            traceback.print_exc()


def load(module: str) -> Any:
    """Import a feature's module; raise a CellmeshError with its name if that fails."""
    name = f"cellmesh.workers.{module}"
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise CellmeshError(
            f"{name} cannot be imported ({type(error).__name__}: {error}), so what needs it does "
            "not work: `python -m pip check` shows which packages are too old"
        ) from error


# ---------------------------------------------------------------- hooks

Hook = Callable[[types.ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """An import finder that delegates to other finders, and calls hooks after given imports."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def install(self) -> None:
        """Insert this finder at the front of `sys.meta_path`."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module by Python's other finders, and make its loader call the module's hook
        afterwards.
        """
        hook = self._hooks.get(fullname)
        if hook is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = spec.loader
                    loader.exec_module = functools.partial(_load, loader.exec_module, hook)
                return spec
        return None


def _load(plain: Hook, hook: Hook, module: types.ModuleType) -> None:
    plain(module)
    hook(module)


_MODULE = "torch._inductor.cpp_builder"


def build_whole_files() -> None:
    """Patch torch.compile's inductor so that this rank and its compile workers build C++ libraries
    under a temporary name, and rename them when they are complete.

    Otherwise a killed rank may leave a truncated library, which later compilations in all processes
    of the user would load. (Inductor writes its other files by `write_atomic`.)
    """
    if _MODULE in sys.modules:  # preloaded
        _patch(sys.modules[_MODULE])
    else:
        AfterImport({_MODULE: _patch}).install()


def _patch(module: types.ModuleType) -> None:
    kind: Any = getattr(module, "CppBuilder", None)
    plain = getattr(kind, "build", None)
    if plain is None or hasattr(plain, "cellmesh"):
        return

    def build(builder: Any) -> None:
        target, output = getattr(builder, "_target_file", ""), getattr(builder, "_output", "")
        if not target or not output.endswith(f" {target}"):  # another version of inductor
            plain(builder)
            return
        part = f"{target}.{os.getpid()}.part"
        # The builder holds the target's lock, so no other process is building it.
        for left in glob.glob(f"{glob.escape(target)}.*.part"):
            os.unlink(left)
        builder._output = f"{output.removesuffix(target)}{part}"
        try:
            plain(builder)
            os.replace(part, target)
        finally:
            builder._output = output
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    build.cellmesh = True  # type: ignore[attr-defined]
    kind.build = build
    kind.__reduce__ = lambda builder: (restore, (vars(builder),))


def restore(state: dict[str, Any]) -> Any:
    """Unpickle a `CppBuilder` of torch.compile in a rank's compile worker process, where `_patch`
    has to be applied first.
    """
    from torch._inductor import cpp_builder

    _patch(cpp_builder)
    builder: Any = object.__new__(cpp_builder.CppBuilder)
    vars(builder).update(state)
    return builder
