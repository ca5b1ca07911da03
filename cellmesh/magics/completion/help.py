"""``obj?``, ``obj??`` and Shift+Tab in cells for the ranks: docstring and source of what lives
there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from IPython.core import page
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor

from ...controller.inspect.query import look_at_one
from ...controller.ranks import Ranks
from ...errors import CellmeshError
from ...wire.completion import Explain
from ..auto import CellForRanks
from .hooks import give_back

# A tooltip is not waited for as one waits for help that one has asked for by name.
_TOOLTIP_S = 0.5
_HELP_S = 5.0


def show_help(shell: InteractiveShell, ranks: Ranks, name: str, detail: int) -> None:
    """Show what ``name?`` (`detail` 0) or ``name??`` (1) shows: the ranks' help, else the
    notebook's.
    """
    text = look_at_one(ranks.rank_set, Explain(name, detail), _HELP_S)
    if text:
        page.page({"text/plain": text})
    else:
        shell.run_line_magic("pinfo2" if detail else "pinfo", name)


class CellHelp:
    """Answers a kernel's requests for help on what stands at a cursor; other shells have none.

    Args:
        shell: the notebook's.
        read: tells which cells are for which ranks.
    """

    def __init__(
        self, shell: InteractiveShell, read: Callable[[str], tuple[CellForRanks, Ranks] | None]
    ) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        self._read = read
        self._own: Any = None

    def install(self) -> None:
        """Take the place of the kernel's own answer."""
        if self._kernel is not None:
            self._own = self._kernel.do_inspect
            self._kernel.do_inspect = self._inspect

    def remove(self) -> None:
        """Undo `install`."""
        give_back(self._kernel, "do_inspect", self._inspect)

    def _inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        text = None
        with contextlib.suppress(
            CellmeshError, UnicodeError
        ):  # the mesh has ended; half of a character
            read = self._read(code)
            if read is not None and cursor_pos >= read[0].begin:
                cell, ranks = read
                name = _name_at(cell.source, cursor_pos - cell.begin)
                text = (
                    look_at_one(ranks.rank_set, Explain(name, detail_level), _TOOLTIP_S)
                    if name
                    else None
                )
        if text:
            return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
        return self._own(code, cursor_pos, detail_level, *args, **kwargs)


_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\n]*'|\"[^\"\n]*\")\])*")


def _name_at(source: str, cursor: int) -> str:
    """The name to explain at a cursor: the one under it, indices and all, else what is called
    there.
    """
    for match in _PATH.finditer(source):
        if match.start() <= cursor <= match.end():
            end = re.compile(r"\w*").match(source, cursor)
            assert end is not None
            upto = source[match.start() : end.end()]
            whole = _PATH.match(upto)
            if whole is not None:
                return whole.group()
    return str(token_at_cursor(source, cursor))
