"""Does something to a module when it is imported, and not before."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence

from .meters import Meters
from .rich_bars import patch_progress
from .tqdm_bars import patch_notebook, patch_std

Hook = Callable[[types.ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and has hooks called once it is loaded.

    Args:
        hooks: module's name -> hook.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.get(fullname)
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is None or spec.loader is None:
                continue
            load = functools.partial(_load, spec.loader.exec_module, hook)
            spec.loader.exec_module = load  # type: ignore[method-assign]
            return spec
        return None


def _load(plain: Hook, hook: Hook, module: types.ModuleType) -> None:
    plain(module)
    _call(hook, module)


def _call(hook: Hook, module: types.ModuleType) -> None:
    try:
        hook(module)
    except Exception:  # another version of it: bars are drawn as it draws them
        traceback.print_exc(file=sys.__stderr__)


def when_imported(hooks: Mapping[str, Hook]) -> None:
    """Call hooks with their modules: now with those that are there, with others once they are imported.

    Args:
        hooks: module's name -> hook.
    """
    for name, hook in hooks.items():
        if name in sys.modules:
            _call(hook, sys.modules[name])
    sys.meta_path.insert(0, _Finder({name: hook for name, hook in hooks.items() if name not in sys.modules}))


def watch_bars(meters: Meters) -> None:
    """Have the progress bars of the libraries that people use say their numbers.

    Args:
        meters: takes them.
    """
    when_imported(
        {
            "tqdm.std": lambda module: patch_std(module, meters),
            "tqdm.notebook": lambda module: patch_notebook(module, meters),
            "rich.progress": lambda module: patch_progress(module, meters),
        }
    )
