"""Command line and import path of agent and zygote, which import the same modules as the kernel.

Their interpreters run this file. ``python -m`` could find another cellmesh than the kernel's, and
``python -c`` would put the working directory first on the path: a ``cellmesh`` or ``torch`` in some
directory must not be imported instead. The file imports only the standard library, as all other
modules are found on the kernel's path.
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
        module: name of the module whose `main` is called with the arguments and returns the exit
            code.
        arguments: arguments of `main`; the last is the path of the mesh's ticket.
    """
    return [sys.executable, "-P", os.path.abspath(__file__), module, *arguments]


def take_import_path(ticket_path: str) -> None:
    """Set this process's import path to that of the notebook's kernel, without its working
    directory.

    The ticket is read as plain JSON, as msgspec can be imported only from that path.
    """
    sys.path[:] = absolute(json.loads(Path(ticket_path).read_bytes())["sys_path"]) or sys.path


def absolute(sys_path: Iterable[str]) -> list[str]:
    """Return the directories of an import path that do not depend on the working directory."""
    return [directory for directory in sys_path if os.path.isabs(directory)]


def _run(module: str, *arguments: str) -> int | None:
    package = Path(os.path.abspath(__file__)).parents[1]
    sys.path.insert(0, str(package.parent))
    importlib.import_module(package.name)  # from now on its modules are found in its directory
    del sys.path[0]
    take_import_path(arguments[-1])
    status: int | None = importlib.import_module(module).main(*arguments)
    return status


if __name__ == "__main__":
    sys.exit(_run(*sys.argv[1:]))
