"""Calls hooks when modules have been imported."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Hook = Callable[[types.ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """An import finder that delegates to the other finders, and calls hooks after a module has been
    loaded.

    Args:
        hooks: module's name -> hook.
    """

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
