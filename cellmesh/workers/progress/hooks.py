"""Patches tqdm and rich, when they are imported, to report their bars' numbers."""

from __future__ import annotations

import functools
import sys
import traceback
import types
from collections.abc import Callable, Mapping

from ..rank.import_hooks import AfterImport
from .meters import Meters
from .rich_bars import patch_progress
from .tqdm_bars import patch_notebook, patch_std

_PATCHES: Mapping[str, Callable[[types.ModuleType, Meters], None]] = {
    "tqdm.std": patch_std, "tqdm.notebook": patch_notebook, "rich.progress": patch_progress,
}  # fmt: skip


def watch_bars(meters: Meters) -> None:
    """Have the bars of tqdm and rich report their numbers.

    Args:
        meters: takes them.
    """
    hooks = {name: functools.partial(_patch, patch, meters) for name, patch in _PATCHES.items()}
    for name in hooks.keys() & sys.modules.keys():  # preloaded
        hooks.pop(name)(sys.modules[name])
    AfterImport(hooks).install()


def _patch(
    patch: Callable[[types.ModuleType, Meters], None], meters: Meters, module: types.ModuleType
) -> None:
    try:
        patch(module, meters)
    except Exception:  # another version of it: bars are drawn as it draws them
        traceback.print_exc(file=sys.__stderr__)
