"""Command line and import path of agent and zygote: they import the modules that the kernel would
import.

Python puts the working directory first on the path of ``python -c``, where the kernel may not have
it at all, or has it last. A directory that happens to hold a ``cellmesh`` or a ``torch`` would then
decide what runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from .host import own_package


def isolated_command(code: str, *arguments: str) -> list[str]:
    """The command line of an interpreter like this one that imports this copy of cellmesh.

    Args:
        code: what it runs; finds ``sys`` imported.
        arguments: its ``sys.argv[1:]``; the last is the path of the mesh's ticket.
    """
    own = (
        f"import sys; sys.path.insert(0, {os.path.dirname(own_package())!r}); "
        "from cellmesh.wire.interpreter import take_import_path; del sys.path[0]; "
        "take_import_path(sys.argv[-1]); "
    )
    return [sys.executable, "-P", "-c", own + code, *arguments]


def take_import_path(ticket_path: str) -> None:
    """Set this process's import path to that of the notebook's kernel, without its working
    directory.

    Libraries are found on the ticket's path; a ticket is read as plain JSON, since msgspec is one
    of them.
    """
    sys.path[:] = absolute(json.loads(Path(ticket_path).read_bytes())["sys_path"]) or sys.path


def absolute(sys_path: Iterable[str]) -> list[str]:
    """The directories of a path that do not depend on the working directory."""
    return [directory for directory in sys_path if os.path.isabs(directory)]
