"""Calls hooks when user code imports certain modules; has the one that torch.compile needs."""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
