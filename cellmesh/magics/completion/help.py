"""Shows help for names on ranks: for ``obj?``, ``obj??``, and the name at a cursor."""

from __future__ import annotations

import re

from IPython.core import page
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor

from ...controller.inspect.query import look_at_one
from ...controller.ranks import Ranks
from ...wire.completion import Explain

_HELP_S = 5.0


def show_help(shell: InteractiveShell, ranks: Ranks, name: str, detail: int) -> None:
    """Show help for ``name?`` (`detail` 0) or ``name??`` (1): the ranks', else the notebook's."""
    text = look_at_one(ranks.rank_set, Explain(name, detail), _HELP_S)
    if text:
        page.page({"text/plain": text})
    else:
        shell.run_line_magic("pinfo2" if detail else "pinfo", name)


_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\n]*'|\"[^\"\n]*\")\])*")


def name_at(source: str, cursor: int) -> str:
    """Return the name to explain at a cursor: the one under it with its indices, else the
    function called there.
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
