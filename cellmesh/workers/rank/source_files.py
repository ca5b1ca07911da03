"""Bounds the files from which tracebacks read the lines of code that they show."""

from __future__ import annotations

import functools
import linecache
import stat
import sys
from typing import Any

from ...stdlib import os

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
