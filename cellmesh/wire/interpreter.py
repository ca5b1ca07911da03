"""Command line and import path of agent and zygote: they import the modules that the kernel would
import.

This file is what their interpreters run (not ``python -m``, which would look for cellmesh where the
kernel may not have found it, and not with the working directory first on the path, as ``python -c``
does): a directory that happens to hold a ``cellmesh`` or a ``torch`` must not decide what runs. It
imports nothing but the standard library, as all else is to be found on the kernel's path.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path


def isolated_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of an interpreter like this one that imports this copy of cellmesh.

    Args:
        module: its `main` is called with the arguments, and gives the exit code.
        arguments: the last is the path of the mesh's ticket.
    """
    return [sys.executable, "-P", os.path.abspath(__file__), module, *arguments]


def take_import_path(ticket_path: str) -> None:
    """Set this process's import path to that of the notebook's kernel, without its working
    directory.

    Libraries are found on the ticket's path; a ticket is read as plain JSON, since msgspec is one
    of them.
    """
    sys.path[:] = absolute(json.loads(Path(ticket_path).read_bytes())["sys_path"]) or sys.path


def absolute(sys_path: Iterable[str]) -> list[str]:
    """Return the directories of an import path that do not depend on the working directory."""
    return [directory for directory in sys_path if os.path.isabs(directory)]


def _run(module: str, *arguments: str) -> int | None:
    package = Path(os.path.abspath(__file__)).parents[1]
    sys.path.insert(0, str(package.parent))
    importlib.import_module(package.name)  # its modules are found beside it from here on
    del sys.path[0]
    take_import_path(arguments[-1])
    status: int | None = importlib.import_module(module).main(*arguments)
    return status


if __name__ == "__main__":
    sys.exit(_run(*sys.argv[1:]))
