"""Imports on a rank: of the modules of its optional features (bars, inspector, debugger), and hooks
that are called when user code imports certain modules.

A feature leans on libraries, and on parts of Python, that change with their versions. The zygote
imports the features for all ranks, but nothing that a rank needs to start or to run a cell does: a
module that cannot be imported is reported where its feature is used, by name.
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


# ---------------------------------------------------------------- hooks

Hook = Callable[[types.ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """An import finder that delegates to the others, and calls a hook after a module's import."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def install(self) -> None:
        """Put this finder first in `sys.meta_path`."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module by the other finders; its loader then calls the hook."""
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
    under a temporary name, and rename what is whole.

    Else a rank that is killed leaves the first half of a library, which later compilations take for
    the library, in every process of the user. (Inductor writes its other files by `write_atomic`.)
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
        if not target or not output.endswith(f" {target}"):  # another version of it
            plain(builder)
            return
        part = f"{target}.{os.getpid()}.part"
        # The builder holds the target's lock, so no other process builds it.
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
    """Unpickle a `CppBuilder` of torch.compile in a rank's compile worker process, where
    `_patch` has to be applied first.
    """
    from torch._inductor import cpp_builder

    _patch(cpp_builder)
    builder: Any = object.__new__(cpp_builder.CppBuilder)
    vars(builder).update(state)
    return builder
