"""Source lines of code that was typed into a notebook, sent along with the code because no file has
them.

So tracebacks, help and the debugger show them on ranks, too, and in the notebook those of the
ranks' cells. They are kept where Python looks for all source lines, in `linecache`, as IPython
keeps those of cells.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

# Longer sources stay where they are.
_MAX_TEXT = 1 << 18


class _Lines(tuple[Any, ...]):
    """An entry of `linecache`: size, no time of a file's, lines, name.

    Attributes:
        cell: the ``In[n]`` that they are, 0 if that is not known.
    """

    cell = 0


class Sources:
    """The sources already written into one pickle, so that each text is in it once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, int] | None] = {}

    def reduce(self, code: types.CodeType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """The pickle reducer of a code object with its source.

        Args:
            code: the code object.
            reduced: how it does without.
        """
        name = code.co_filename
        if name not in self._known:
            self._known[name] = _find(name)
        known = self._known[name]
        return reduced if known is None else (restore, (name, *known, *reduced[:2]))


def restore(
    name: str, text: str, cell: int, make: Callable[..., types.CodeType], args: tuple[Any, ...]
) -> types.CodeType:
    """Rebuild a code object, and register its source with `linecache` if it is new."""
    if name not in linecache.cache:
        lines = _Lines((len(text), None, text.splitlines(keepends=True), name))
        lines.cell = cell
        linecache.cache[name] = lines
    return make(*args)


def cell_of(name: str) -> int:
    """The ``In[n]`` of the cell with this code file name, 0 for other code."""
    return int(getattr(linecache.cache.get(name), "cell", 0))


def _find(name: str) -> tuple[str, int] | None:
    entry: Any = linecache.cache.get(name)
    if (
        entry is None or len(entry) != 4 or entry[1] is not None
    ):  # the lines are in a file, or unknown
        return None
    text = "".join(entry[2])
    if len(text) > _MAX_TEXT:
        return None
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cells = shell.compile._filename_map if shell is not None else {}
    return text, cell_of(name) or int(cells.get(name, 0))
