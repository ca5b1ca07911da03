"""Compiles the cells of a rank, keeps their text for tracebacks, and bounds the files from which
tracebacks read theirs.
"""

from __future__ import annotations

import functools
import linecache
import stat
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.compilerop import CachingCompiler

from ...stdlib import os
from ...wire import payload

# Of so many cells the text is kept, for tracebacks: of those that only ran, and of those that
# define what may be called later.
_MAX_PLAIN, _MAX_DEFINING = 1_000, 10_000
_DEFINES = ("def ", "class ", "lambda")

_T = TypeVar("_T")
# A parse takes far less than a thread's turn, so that two in a row are hardly disturbed.
_NUM_TRIES = 5


class RankCompiler(CachingCompiler):
    """Names cells in tracebacks (``In[3]``), also cells whose functions were sent to the rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plain: dict[str, None] = {}
        self._defining: dict[str, None] = {}

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Keep a cell's source under a file name, for tracebacks; drop the oldest over a limit."""
        name = super().cache(transformed_code, number, raw_code)
        names, most = self._plain, _MAX_PLAIN
        for word in _DEFINES:
            if word in transformed_code:
                names, most = self._defining, _MAX_DEFINING
        names.pop(name, None)
        names[name] = None  # the newest
        if len(names) > most:
            oldest = next(iter(names))
            del names[oldest]
            self._filename_map.pop(oldest, None)
            linecache.cache.pop(oldest, None)
        return name

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return how tracebacks name a code file, as ``Cell In[3]`` for a cell."""
        cell = payload.cell_of(name)
        return ("Cell", f"In[{cell}]") if cell else super().format_code_name(name)


def parse_again(parse: Callable[[], _T]) -> _T:
    """Call a function that makes an AST, again if a parse of another thread has disturbed it.

    CPython 3.11 counts how deep it is in an AST in one place for all threads (Python-ast.c,
    ``ast_state.recursion_depth``). Seen on ranks: the control thread looked for the call that the
    main thread was in, and the main thread's next cell ended with a SystemError.

    Raises:
        SystemError: it was disturbed each time.
    """
    for _ in range(_NUM_TRIES - 1):
        try:
            return parse()
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return parse()


# The largest modules that people write have a tenth of it.
MAX_SOURCE_BYTES = 8 << 20


def bound_source_files() -> None:
    """Patch `linecache` so that it reads regular files of a bounded size only.

    The name of a code object's file may be that of anything (``compile(text, "/dev/zero",
    "exec")``): to read a pipe or a device does not end.
    """
    update = linecache.updatecache

    @functools.wraps(update)
    def update_bounded(filename: str, module_globals: Any = None) -> list[str]:
        # `linecache` looks for a relative name along `sys.path`, too.
        folders = [""] if os.path.isabs(filename) else ["", *sys.path]
        paths = [os.path.join(folder, filename) for folder in folders if type(folder) is str]
        return update(filename, module_globals) if all(map(_may_be_read, paths)) else []

    linecache.updatecache = update_bounded


def _may_be_read(path: str) -> bool:
    """Return whether a path has nothing, or a regular file that is not too large."""
    try:
        found = os.stat(path)
    except OSError:
        return True
    except ValueError:  # a name with a null byte, on which `linecache` itself raises
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= MAX_SOURCE_BYTES
